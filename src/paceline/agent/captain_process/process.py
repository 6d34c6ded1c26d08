"""The captain's process: passes events to the captain, and carries out its instructions."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterable
from typing import Any

from paceline import __version__
from paceline.agent import series_files
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain import start_times
from paceline.agent.captain.ledger import OVER
from paceline.agent.captain.state_machine import Captain
from paceline.agent.captain_process.connections import Connections
from paceline.agent.captain_process.event_log import UPLOADED, EventLog
from paceline.agent.captain_process.saved_notes import CaptainNotes
from paceline.agent.captain_process.successor_check import SuccessorCheck
from paceline.agent.captain_process.ticks import Ticks
from paceline.agent.deliveries.addresses import addresses_of
from paceline.agent.deliveries.client import Deliveries
from paceline.agent.deliveries.saved_state import saved_mlflow_run
from paceline.agent.exhaustive import assert_never
from paceline.agent.metrics.captain_samples import CaptainSamples
from paceline.agent.metrics.server import MetricsServer
from paceline.agent.net import messages
from paceline.agent.net.frames import encode, encode_packed
from paceline.agent.net.loop import Loop
from paceline.agent.options import FAILED, LEAVING, SAVING_SHARE, Options, endpoint
from paceline.agent.redaction import Redactor
from paceline.agent.run_files import Echo, replace, stamp, write_termination_message
from paceline.agent.transfers.log_upload import LogUpload
from paceline.agent.transfers.porter_client import PorterClient, porter_settings
from paceline.agent.transfers.requests import Request
from paceline.plan import GROUP, from_data

HEAD_START = 0.1  # seconds by which the leader of a group starts before the others
MLFLOW_S = 30.0  # seconds for which tasks wait for an MLflow server before they start without its run
LEAVING_WITHIN = 1.0  # seconds in which other hosts on the node report that they must shut down, too
REPORT = "report.json"
UPLOADED_REPORT = ".report.uploaded.json"  # written once; the report itself is replaced if something is not delivered


class CaptainProcess:
    def __init__(self, options: Options) -> None:
        with open(options.plan) as file:
            self._plan = plan = from_data(json.load(file))
        self._options = options
        self._rank = {task.name: task.rank for task in plan.tasks}
        self.loop = Loop()
        now = self.loop.now()
        environment = {**os.environ, **next(role.env for role in plan.roles if role.decides)}
        addresses = addresses_of(plan, environment)
        self._redact = Redactor(os.environ, *(role.env for role in plan.roles), secrets=addresses)
        self._log = EventLog(options.folder, Echo() if options.echo else None, _print, self._redact)
        self._notes = CaptainNotes(options.folder, now)
        settings = porter_settings(plan, options)
        name, clock_offset = os.urandom(8).hex(), self._notes.clock_offset
        self._captain = self._notes.restored(
            lambda notes: Captain(plan, options.run, options.lease, now, time.time(), notes, clock_offset, name)
        )
        self._porter = PorterClient(settings, environment, self.loop)
        if settings.serve:
            self._porter.start()
        self._deliveries = Deliveries(options, environment, self.loop, self._on_delivery_message)
        self._mlflow_run = saved_mlflow_run(options.folder)  # its id, once it is known
        if plan.delivers:
            self._deliveries.start()
        self._uploaded_report = UPLOADED_REPORT if plan.delivers else REPORT
        files = {"events.jsonl": f"{options.folder}/{UPLOADED}", REPORT: f"{options.folder}/{self._uploaded_report}"}
        self._upload = LogUpload(
            plan, options, {"plan.json": options.plan, **files}, self._porter, self.loop,
            lambda text: self._handle(ev.Notice(options.host, text, warning=True)),
        )  # fmt: skip
        self.loop.on_child(self._child_ended)
        self.loop.on_signal(signal.SIGTERM, self._on_sigterm)
        _raise_file_limit()
        beat_every = 1.0 if len(plan.hosts) <= 256 else options.lease / 4
        self._connections = Connections(options, self._captain, beat_every, self.loop, self._handle)
        started = series_files.seconds(self._notes.started)
        self._samples = CaptainSamples(
            self._captain, self._log.goodput, self._log.resources, options.folder, started, __version__, now
        )
        self._metrics: MetricsServer | None = None
        if plan.track is not None and self._notes.is_new:
            self._connections.hold_joins()
            self.loop.after(MLFLOW_S, self._begin_without_mlflow)
        if self._notes.is_new:
            hosts = [host.name for host in plan.first_hosts]
            tasks = [task.name for task in plan.tasks if task.host in hosts]
            fields = {"framework": plan.framework, "strategy": plan.strategy, "tasks": tasks, "hosts": hosts}
            scope = {} if plan.restart_scope == GROUP else {"restart_scope": plan.restart_scope}
            self._log.write("run-started", 0, {"run": options.run, "job": plan.name, **fields, **scope})
        if self._notes.problem:
            self._log.write("warning", self._captain.generation, {"text": self._notes.problem})
        self._log.reserve_space()
        self._notes.save(self._captain, now)
        self._exit_code = 0
        Ticks(self.loop, self._tick_every, beat_every, self._tick).start()
        if options.metrics:
            self._metrics = self._serve_metrics(endpoint(options.metrics))
        if options.listen:
            self._successor = SuccessorCheck(self.loop, options.captain, options.address, self._step_down)

    def run(self) -> int:
        self.loop.run()
        self._porter.close()
        self._deliveries.close()
        return self._exit_code

    def _serve_metrics(self, address: tuple[str, int]) -> MetricsServer:
        def text(openmetrics: bool) -> bytes:
            return self._samples.text(openmetrics, self.loop.now())

        def report(problem: str) -> None:
            self._handle(ev.Notice(self._options.host, problem, warning=True))

        return MetricsServer(self.loop, address, text, report)

    def _child_ended(self, pid: int, _: int) -> None:
        self._porter.child_ended(pid) or self._deliveries.child_ended(pid)

    def _on_delivery_message(self, message: dict[str, Any]) -> None:
        if "mlflow_run" in message:
            self._mlflow_run = str(message["mlflow_run"])
            self._connections.release_joins()
        else:
            self._handle(ev.Notice(self._options.host, str(message["warning"]), warning=True))

    def _begin_without_mlflow(self) -> None:
        """Tasks that start now do not know the run of MLflow."""
        if not self._mlflow_run:
            text = f"the MLflow server has not answered for {MLFLOW_S:g} s: tasks start without MLFLOW_RUN_ID"
            self._handle(ev.Notice(self._options.host, text, warning=True))
        self._connections.release_joins()

    def _on_sigterm(self) -> None:
        """Other hosts on the same node may have to shut down, too: their group needs a captain to take a snapshot,
        and to record why its tasks ended."""
        longest = SAVING_SHARE * self._plan.limits.grace
        until = self.loop.now() + longest

        def exit_if_idle() -> None:
            if self._captain.phase == OVER:
                # This captain would be replaced if it did not report how the run ended.
                self._deliveries.give_up("the captain had to shut down before everything was delivered")
            elif (self._captain.leaving or self._captain.is_stopping) and self.loop.now() < until:
                self.loop.after(0.1, exit_if_idle)
            else:
                self._exit_code = LEAVING
                self.loop.stop()

        self.loop.after(min(LEAVING_WITHIN, longest), exit_if_idle)

    # ---- events in, instructions out

    def _handle(self, event: ev.Event) -> None:
        for instruction in self._captain.handle(event, self.loop.now()):
            self._carry_out(instruction)
        self._notes.save_if_due(self._captain, self.loop.now(), isinstance(event, ev.Tick))

    def _tick(self) -> None:
        self._connections.drop_silent()
        self._handle(ev.Tick())
        self._connections.admit_successors()

    def _tick_every(self) -> float:
        return 0.5 if len(self._captain.members) <= 256 else 1.0

    def _carry_out(self, instruction: ins.Instruction) -> None:
        if isinstance(instruction, ins.EmitEvent):
            if instruction.kind == "run-ended":
                self._log.release_space()
            self._log.write(instruction.kind, instruction.generation, instruction.fields)
            self._samples.on_event(instruction.kind, instruction.fields, self.loop.now())
        elif isinstance(instruction, ins.StartTasks):
            self._start_tasks(instruction)
        elif isinstance(instruction, ins.AskStore):
            self._request_from_store(instruction.request, instruction.ticket)
        elif isinstance(instruction, ins.StepDown):
            self._step_down(instruction.reason)
        elif isinstance(instruction, ins.EndRun):
            self._end_run(instruction)
        elif isinstance(
            instruction,
            (
                ins.EndTasks, ins.DismissMember, ins.StorePart, ins.DropPart, ins.PrepareHost, ins.PrefetchSnapshot,
                ins.AnnounceCommit, ins.EvaluateSnapshot, ins.AcknowledgeEvaluation, ins.AgreeOnStep, ins.ReleaseHost,
                ins.PrepareSpare,
            ),
        ):  # fmt: skip
            self._connections.send(instruction.host, encode(messages.captain_message(instruction)))
        else:
            assert_never(instruction)

    def _start_tasks(self, start: ins.StartTasks) -> None:
        self._notes.save(self._captain, self.loop.now())  # the next captain must know of this generation
        roster = encode_packed(messages.captain_message(messages.Roster(start.generation, start.roster)))
        restore = None if start.restore is None else str(start.restore)
        for host, tasks in start.hosts.items():
            message = messages.StartOnHost(
                start.generation, start.restarts, start.data, restore, tasks, start.records, self._mlflow_run
            )
            frames = (roster, encode(messages.captain_message(message)))
            if start.generation == 1 and self._needs_leader(tasks, start.roster):
                self._connections.send_later(host, frames, HEAD_START)
            else:
                self._connections.send(host, *frames)

    def _needs_leader(self, tasks: Iterable[str], roster: Iterable[str]) -> bool:
        """Whether these tasks connect to the first task of their group, and lose a second if it has not started yet."""
        if self._plan.framework not in ("tensorflow", "jax") or self._plan.strategy == "parameter-server":
            return False
        first = min((rank for name in roster if (rank := self._rank.get(name, -1)) >= 0), default=0)
        return all(self._rank.get(name, 0) > first for name in tasks)

    def _request_from_store(self, request: Request, ticket: int) -> None:
        self._porter.ask(request, lambda answer: self._handle(ev.StoreAnswered(request, answer, ticket)))

    def _step_down(self, reason: str) -> None:
        _print(f"{reason}; this captain exits")
        self._exit_code = LEAVING
        self._connections.close_all()
        self.loop.stop()

    # ---- the end

    def _end_run(self, end: ins.EndRun) -> None:
        report = self._redact.texts(self._report(end))
        self._write_report(REPORT, report)
        summary_fields = ("status", "reason", "cause", "generations", "steps", "steps_per_s", "started", "ended")
        write_termination_message(self._options.last_words, {name: report[name] for name in summary_fields})
        self._exit_code = FAILED if end.status == "failed" else 0
        self._connections.dismiss_successors(end.status, end.reason)
        self._connections.close_all()
        self._connections.stop_listening()
        if self._metrics is not None:
            self._metrics.close()
        if self._plan.delivers:
            self._deliveries.end(lambda undelivered: self._finish(report, undelivered))
        else:
            self._finish(report, [])

    def _finish(self, report: dict[str, Any], undelivered: list[str]) -> None:
        undelivered = [self._redact(text) for text in undelivered]
        if undelivered:
            for text in undelivered:
                self._log.write("warning", self._captain.generation, {"text": text})
            report = {**report, "undelivered": undelivered}
            self._write_report(REPORT, report)
        if self._uploaded_report != REPORT:
            self._write_report(self._uploaded_report, report)
        if self._captain.generation or self._options.echo:
            self._upload.close(self.loop.stop)
        else:
            self.loop.stop()  # the store contains nothing of this run, and may be the cause of the failure

    def _write_report(self, name: str, report: dict[str, Any]) -> None:
        try:
            replace(f"{self._options.folder}/{name}", report)
        except OSError as error:
            _print(f"cannot write the report: {error}")

    def _report(self, end: ins.EndRun) -> dict[str, Any]:
        captain = self._captain
        best = captain.commits.contents.best()
        return {
            "run": self._options.run,
            "status": end.status,
            "reason": end.reason,
            "cause": end.cause,
            "generations": captain.generation,
            "restarts": [
                {
                    "cause": restart.cause,
                    "task": restart.task,
                    "detail": restart.detail,
                    "at": stamp(restart.failed_at_wall),
                    "first_step_after_s": restart.first_step_after_s,
                }
                for restart in captain.failures.followed_restarts()
            ],
            "starts": start_times.to_report(captain.starts),
            "steps": captain.watch.steps,
            "steps_per_s": captain.watch.steps_per_second(),
            "metrics": captain.watch.metrics,
            "best": None if best is None else best.to_json(),
            "skipped": captain.commits.skipped,
            "started": self._notes.started,
            "ended": stamp(),
            "folder": self._options.folder,
            "stacks": captain.failures.stacks,
            "goodput": self._log.goodput.to_report(),
            "resources": self._log.resources.to_report(),
        }


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:
        pass  # this output may be on the full disk, too


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass


def main(options: Options, beat: Any | None = None) -> int:
    process = CaptainProcess(options)
    if beat is not None:
        beat(process.loop)
    os.chdir("/")
    return process.run()
