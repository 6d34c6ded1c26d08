"""An example of every message between captain and members: tests/unit/test_wire.py checks that none is missing."""

from __future__ import annotations

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain_process.pause_requests import KINDS as PAUSE_KINDS
from paceline.agent.captain_process.scale_requests import SCALE
from paceline.agent.captain_process.task_requests import KINDS as TASK_KINDS
from paceline.agent.net import messages
from paceline.agent.net.frames import Message
from paceline.agent.profile_messages import ProfileTaken, TakeProfile
from paceline.agent.stack_messages import Frame, StacksTaken, TakeStacks, ThreadSamples
from paceline.agent.transfers import requests as req
from paceline.storage.snapshots.manifest import File, SnapshotId

SNAPSHOT = SnapshotId(20, 3)
SAVED = ev.PartSaved("host", "worker-0", SNAPSHOT, 2, {"loss": 0.5}, {"torch": "2"}, {"norm": "Infinity"})
NOT_FINITE = ev.MetricNotFinite("host", "worker-0", 3, "loss", "NaN", 25)
EVALUATED = ev.SnapshotEvaluated("host", "evaluator-0", SNAPSHOT, {"accuracy": 0.9})
EXIT = ev.TaskExit(
    "worker-0", 2, None, "SIGKILL", False, "signal", "died", "here", True, 0.5, 30.0, 2.0, "model.pt", False
)
FAILURE = req.Failure(req.STORE, "away", True)
RESOURCES = ev.HostResources(
    2.0**30, 2.0**33, 5.5, 0.0, {"worker-0": ev.TaskResources(1.5, 2.0**30, 2.0**30, 0.0, 7.0)},
    (ev.GpuResources(0.5, 1.0, 2.0),),
)  # fmt: skip
FROM_MEMBERS: list[messages.MemberMessage] = [
    ev.Heartbeat("host", 3, {"worker-0": ev.TaskProgress(7, 0.1, 0.2, {"loss": 0.5})}, 0.5, ("worker-0",)),
    ev.Heartbeat("host", 3, {}, resources=RESOURCES),
    ev.TaskStarted("host", "worker-0", 1, 100, True),
    ev.StartMeasured("host", "worker-0", 1, ev.StartTimes(2.5, 2.6, 2.7, 3.0, None, 4.5)),
    NOT_FINITE,
    ev.MetricNotFinite("host", "worker-0", 3, "loss", "-Infinity"),
    ev.SpareReady("host", 2.5),
    ev.SpareReady("host", 2.5, '{"late": 0}\n"torch"\n'),
    ev.TaskExited("host", EXIT),
    ev.TasksEnded("host", {"worker-0": 1}, {"worker-0": "h:1"}, {"worker-0": "busy"}, {"worker-0": "stack"}),
    SAVED,
    ev.PartStored("host", "worker-0", SNAPSHOT, (File("a/b", 3, "0" * 64),), None, 500, True),
    ev.PartStored("host", "worker-0", SNAPSHOT, error=FAILURE),
    ev.HostPrepared("host", None),
    ev.HostPrepared("host", SNAPSHOT, FAILURE),
    ev.SnapshotPrefetched("host", SNAPSHOT),
    ev.SnapshotPrefetched("host", SNAPSHOT, FAILURE),
    EVALUATED,
    ev.EvaluatorWaiting("host", "evaluator-0"),
    ev.IngestProgress("host", "there", "/data", "other-run", True, 3, 100),
    ev.HostLeaving("host", "SIGTERM"),
    ev.SaveRequested("host", "worker-0"),
    ev.AgreementReply("host", "worker-0", "yes", 1, 3, 40),
    ev.Notice("host", "the disk is full", True),
    ev.MemberLeft("host"),
    StacksTaken(
        "host",
        3,
        "worker-0",
        "",
        100,
        (Frame("train.py", 41, "step"),),
        ((0,),),
        (ThreadSamples(100, (0, 0), 0.1),),
        True,
    ),
    ProfileTaken(
        "host", 3, "worker-0", "it ended", 7, {"plugins/profile/2026_01_02_03_04_05/worker-0.xplane.pb": 9}, True
    ),
]
FROM_CAPTAIN: list[messages.CaptainMessage] = [
    messages.Welcome(10.0, 1.0),
    messages.Wait(),
    messages.HeartbeatReply(3),
    messages.Roster(2, {"worker-0": "h:1"}),
    messages.StartOnHost(2, 1, "/data", "step-20-g3", {"worker-0": 2}),
    TakeStacks(3, ("worker-0",), 10.0),
    TakeProfile(3, ("worker-0",), 20, 120.0, "2026_01_02_03_04_05"),
    ins.EndTasks("host", {"worker-0": 1}, ins.TERMINATE, 30.0),
    ins.DismissMember("host", "succeeded", ""),
    ins.StorePart("host", "worker-0", SNAPSHOT, True),
    ins.DropPart("host", "worker-0", SNAPSHOT),
    ins.PrepareHost("host", None, 2),
    ins.PrefetchSnapshot("host", SNAPSHOT, {"worker-0": "10.0.0.1:7000"}),
    ins.AnnounceCommit("host", SNAPSHOT),
    ins.EvaluateSnapshot("host", "evaluator-0", SNAPSHOT),
    ins.AcknowledgeEvaluation("host", SNAPSHOT),
    ins.AgreeOnStep("host", ("worker-0",), {"say": "at", "which": 1, "count": 12}),
    ins.ReleaseHost("host"),
    ins.PrepareSpare("host", '"torch"\n'),
]
JOINED = ev.MemberJoined(
    "host", "a", 2, True, "node", 3, {"worker-0": 1}, (EXIT,), {"worker-1": "h:1"}, (SAVED,),
    {"evaluator-0": None, "evaluator-1": SNAPSHOT}, (EVALUATED,), "/data", not_finite=(NOT_FINITE,),
)  # fmt: skip

# What command lines send. A stop is not among them: it would end the run.
_FIELDS = {"tasks": ["worker-0"], "seconds": 1.0, "steps": 3, "role": "worker", "hosts": 2, "within": 60.0}
FROM_USERS: list[Message] = [{"type": kind, **_FIELDS} for kind in (*TASK_KINDS, SCALE, *PAUSE_KINDS)]


def from_members(task: str) -> list[Message]:
    """As a member with this task sends them, after it has joined."""
    plain = [messages.member_message(event) for event in FROM_MEMBERS]
    return [{**message, "task": task} if "task" in message else message for message in plain]
