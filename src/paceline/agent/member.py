"""A member: starts and ends the tasks of its host on the captain's instructions, and shuts down when asked."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from typing import Any, Callable

from paceline.agent import memory_limits
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.exhaustive import assert_never
from paceline.agent.net.captain_connection import CaptainConnection
from paceline.agent.net.loop import Loop
from paceline.agent.net.messages import CaptainMessage, HeartbeatReply, Roster, StartOnHost, Wait, Welcome
from paceline.agent.options import LEAVING, SAVING_SHARE, Options
from paceline.agent.profile_messages import TakeProfile
from paceline.agent.redaction import Redactor
from paceline.agent.run_files import Echo, write_termination_message
from paceline.agent.stack_messages import TakeStacks
from paceline.agent.tasks.compiled_folder import compiled_folder
from paceline.agent.tasks.gpus import ORDER, GpuMonitor, HostGpus
from paceline.agent.tasks.host_tasks import HostTasks
from paceline.agent.tasks.profile_collector import ProfileCollector
from paceline.agent.tasks.resource_sampler import ResourceSampler, cpu_clock
from paceline.agent.tasks.stack_sampler import StackSampler
from paceline.agent.tensorboard.file_sender import FileSender
from paceline.agent.tensorboard.trim_requests import TrimRequests
from paceline.agent.transfers.compiled_upload import CompiledUpload
from paceline.agent.transfers.evaluator_copies import EvaluatorCopies
from paceline.agent.transfers.host_snapshots import HostSnapshots
from paceline.agent.transfers.log_upload import LogUpload
from paceline.plan import INGEST, from_data

CHECK_SENT_EVERY = 0.1  # seconds


class Member:
    def __init__(self, options: Options, instance: str, number: int) -> None:
        with open(options.plan) as file:
            self._plan = from_data(json.load(file))
        self._options = options
        self._instance = instance
        self._number = number
        host = self._plan.host(options.host)
        self.loop = Loop()
        os.makedirs(f"{options.folder}/logs", exist_ok=True)
        echo = Echo() if options.echo else None
        self._connection = CaptainConnection(options, self.loop, echo, self._join, self._heartbeat, self._receive)
        self._snapshots = HostSnapshots(self._plan, options, self.loop, self._connection.send, self._connection.notify)
        self._evaluators = EvaluatorCopies(
            self._plan, options, self._snapshots.porter, self.loop, self._connection.send, self._connection.notify,
            self._snapshots.remove, lambda task, message: self._tasks.tell([task], message),
        )  # fmt: skip
        self._tasks = HostTasks(
            self._plan, options, self.loop, self._connection, self._snapshots, self._evaluators, echo,
            self._leave_for_replacement,
        )  # fmt: skip
        environment = {**os.environ, **self._plan.role(host.role).env}
        self._gpus = GpuMonitor(HostGpus(options.devices, environment.get(ORDER, "")))
        self._sampler = ResourceSampler(
            memory_limits.Memory(options.memory), self._gpus.last, self.loop.now(), cpu_clock
        )
        ingest = self._plan.ingest_task
        logged_tasks = [*host.tasks, *([INGEST] if ingest is not None and ingest.host == host.name else [])]
        self._upload = LogUpload(
            self._plan, options, {f"logs/{name}.log": f"{options.folder}/logs/{name}.log" for name in logged_tasks},
            self._snapshots.porter, self.loop, lambda text: self._connection.notify(text, True),
        )  # fmt: skip
        self._compiled = CompiledUpload(
            self._plan, options, compiled_folder(self._plan, options), self._snapshots.porter, self.loop
        )
        redact = Redactor(os.environ, self._plan.role(host.role).env)
        self._stacks = StackSampler(
            options.host, self.loop, self._tasks.attempts, self._tasks.program_processes, redact, self._connection.send
        )
        self._profiles = ProfileCollector(
            options.host, self._plan.framework, options.folder, self.loop, self._tasks.attempts, redact,
            self._connection.send, self._snapshots.remove,
        )  # fmt: skip
        self._curves = TrimRequests(self._plan, options, self._snapshots.porter, self.loop)
        self._leaving = False
        self._leave_by = 0.0  # how long to wait for the upload of its last snapshot
        self._tasks_terminated = False
        self._run_over = False
        self._may_return = False  # it leaves before the run ends
        self._exit_code = 0
        self._sender = FileSender(options, warns=host.index == 0) if options.tensorboard else None
        if self._sender is not None:
            self._sender.start()
        self.loop.on_child(self._tasks.child_ended, self._tasks.children_ended)
        self.loop.on_signal(signal.SIGTERM, self._on_sigterm)
        self._snapshots.bring_library()
        self._connection.dial()
        self._beat()
        self._check_lease()

    def run(self) -> int:
        self.loop.run()
        self._tasks.close()
        self._gpus.close()
        self._snapshots.close()
        self._profiles.close()
        if self._run_over:
            self._snapshots.tidy(self._may_return)
            self._evaluators.tidy()
        if self._sender is not None:
            self._sender.close()
        return self._exit_code

    # ---- the captain

    def _join(self) -> ev.MemberJoined:
        return ev.MemberJoined(
            host=self._options.host,
            instance=self._instance,
            agent=self._number,
            replaces=self._options.replaces,
            place=self._options.place,
            generation=self._tasks.notes.generation,
            running={name: attempt.number for name, attempt in self._tasks.attempts.items()},
            exits=self._tasks.exits(),
            offers=self._tasks.offers(),
            held=tuple(self._snapshots.held_parts()),
            follows=self._evaluators.follows(),
            evaluated=self._evaluators.unacknowledged(),
            data=self._tasks.notes.data,
            records=self._tasks.notes.records,
            serves=self._options.peers,
            not_finite=self._tasks.not_finite.all(),
        )

    def _heartbeat(self, number: int) -> ev.Heartbeat:
        return replace(self._tasks.heartbeat(number), resources=self._sampler.take(self.loop.now()))

    def _receive(self, message: CaptainMessage) -> None:
        if isinstance(message, Roster):
            self._tasks.roster = dict(message.roster)
        elif isinstance(message, StartOnHost):
            self._curves.begin_generation(message.generation, message.restore, self._tasks.reached)
            self._tasks.start(message)
        elif isinstance(message, TakeStacks):
            self._stacks.take(message)
        elif isinstance(message, TakeProfile):
            self._profiles.take(message)
        elif isinstance(message, ins.EndTasks):
            self._tasks.end(message)
        elif isinstance(message, ins.StorePart):
            self._snapshots.store(message)
        elif isinstance(message, ins.DropPart):
            self._snapshots.drop(message)
        elif isinstance(message, ins.PrepareHost):
            self._snapshots.prepare(message)
        elif isinstance(message, ins.PrefetchSnapshot):
            self._snapshots.prefetch(message)
        elif isinstance(message, ins.AnnounceCommit):
            if not self._evaluators:
                self._snapshots.copy_for_evaluators(message.snapshot)
        elif isinstance(message, ins.EvaluateSnapshot):
            self._evaluators.evaluate(message)
        elif isinstance(message, ins.AcknowledgeEvaluation):
            self._evaluators.acknowledge(message.snapshot)
        elif isinstance(message, ins.AgreeOnStep):
            self._tasks.tell(message.tasks, message.words)
        elif isinstance(message, ins.ReleaseHost):
            self._terminate_tasks()
        elif isinstance(message, ins.PrepareSpare):
            self._tasks.learn_imports(message.imports)
        elif isinstance(message, ins.DismissMember):
            self._on_dismissed(message)
        elif isinstance(message, (Welcome, Wait, HeartbeatReply)):
            pass  # the connection has handled it
        else:
            assert_never(message)

    def _on_dismissed(self, message: ins.DismissMember) -> None:
        if message.status == "replaced":
            self._exit_code = LEAVING
        else:
            self._run_over, self._may_return = True, message.status == ins.RELEASED
        write_termination_message(self._options.last_words, {"status": message.status, "reason": message.reason})
        self._finish()

    def _beat(self) -> None:
        self._snapshots.collect()
        self._snapshots.watched.capture(self._tasks.attempts)
        attempts = self._tasks.attempts.values()
        pids = {(each.task.name, each.number): (each.pid, each.started) for each in attempts if not each.exited}
        self._sampler.sample(pids, self.loop.now())
        self._connection.beat()
        self._tasks.look()
        for text in self._sender.notices() if self._sender is not None else ():
            self._connection.notify(text, True)
        self.loop.after(self._connection.beat_every, self._beat)

    def _check_lease(self) -> None:
        """Once the lease has expired, another generation may be starting: end the tasks of this host."""
        if self._tasks.attempts and self._connection.lease_remaining() < 0:
            text = f"received no message from the captain for {self._connection.lease:g} s and ended its tasks"
            self._connection.notify(f"{self._options.host} {text}", True)
            self._tasks.kill_unasked()
        if reason := self._connection.reason_to_leave(self._plan.limits.start):
            write_termination_message(self._options.last_words, {"status": "left", "reason": reason})
            self._finish()
        delay = min(0.5, self._connection.lease / 20)
        if self._connection.joined:
            delay = max(delay, self._connection.lease_remaining())
        self.loop.after(delay, self._check_lease)

    # ---- shutting down

    def _on_sigterm(self) -> None:
        if self._leaving or self._run_over:
            return
        self._leaving = True
        grace = self._plan.limits.grace
        self._leave_by = self.loop.now() + SAVING_SHARE * grace
        self._connection.send(ev.HostLeaving(self._options.host, "SIGTERM"))
        self._tasks.leave(grace)
        if self._connection.joined and any(attempt.polls_for_saves for attempt in self._tasks.attempts.values()):
            # The group takes a snapshot first; the captain releases this host once it is committed.
            self.loop.after(SAVING_SHARE * grace, self._terminate_tasks)
        else:
            self._terminate_tasks()

    def _terminate_tasks(self) -> None:
        if not self._leaving or self._tasks_terminated:
            return
        self._tasks_terminated = True
        self._tasks.terminate()
        if not self._tasks.attempts:
            self._leave_for_replacement()

    def _leave_for_replacement(self) -> None:
        """The folder of a pod is deleted with it. So while there is time, its newest snapshot is sent first."""
        if self._run_over:
            return  # the run has ended in the meantime: this member is leaving
        self._exit_code = LEAVING
        can_wait = self._options.echo and self._connection.joined and self.loop.now() < self._leave_by
        if can_wait and self._snapshots.has_unsent():
            self.loop.after(CHECK_SENT_EVERY, self._leave_for_replacement)
        else:
            self._upload_and_leave()

    def _finish(self) -> None:
        self._tasks.kill()
        self._upload_and_leave()

    def _upload_and_leave(self) -> None:
        """If the run is over, upload the last output first: the captain waits for it, and may serve the store.
        Otherwise exit immediately: another instance of this host may be waiting."""
        if self._run_over:
            self._curves.close(lambda: self._upload.close(self._leave))
        else:
            self._leave()

    def _leave(self) -> None:
        self._connection.send(ev.MemberLeft(self._options.host))
        self.loop.after(0.0, self._disconnect)

    def _disconnect(self) -> None:
        self._connection.hang_up()
        self._curves.close(lambda: self._upload.close(self.loop.stop))


def main(options: Options, instance: str, number: int, beat: Callable[[Any], None]) -> int:
    sys.stdout.flush()
    member = Member(options, instance, number)
    beat(member.loop)
    return member.run()
