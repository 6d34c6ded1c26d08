"""All metrics: their names, types and labels. Each also has the label `run`."""

from __future__ import annotations

from paceline.agent.metrics.openmetrics_text import COUNTER, GAUGE, INFO, LEFT_OUT, Family

CAUSES = (
    "program-error", "signal", "out-of-memory", "port-in-use", "start-failed", "host-lost", "hang", "nan", "preempted",
    "store", "other",
)  # fmt: skip
SAVED, COMMITTED = "saved", "committed"  # values of `state`

RUN = Family("paceline_run", INFO, "The job of the run.", ("name", "framework", "strategy", "version"))
STATUS = Family("paceline_run_status", GAUGE, "1 for the current status of the run.", ("status",))
STARTED = Family("paceline_run_start_time_seconds", GAUGE, "When the run started, in seconds since 1970.")
GENERATION = Family("paceline_generation", GAUGE, "The number of the current generation; 0 before the first.")
RESTARTS = Family("paceline_restarts", COUNTER, "Restarts of tasks or groups, by cause.", ("cause",))

TIME = Family("paceline_time_seconds", GAUGE, "Time of the run by kind; the kinds add up to its age.", ("kind",))
GOODPUT = Family("paceline_goodput_ratio", GAUGE, "Fraction of the time that was spent on training that counts.")
DISK_FREE = Family("paceline_disk_free_bytes", GAUGE, "Free space on the disk of the run's folder, at the captain.")
DISK_SIZE = Family("paceline_disk_size_bytes", GAUGE, "Size of that disk.")

STEP = Family("paceline_step", GAUGE, "The highest step that training has reported.")
SPEED = Family("paceline_steps_per_second", GAUGE, "Steps per second, as last measured in the task furthest ahead.")
PROGRESS_AGE = Family(
    "paceline_progress_age_seconds", GAUGE, "Time since training last reached a new highest step or saved a snapshot."
)
TASK_UP = Family("paceline_task_up", GAUGE, "1 while the task runs.", ("task",))
TASK_STEP = Family("paceline_task_step", GAUGE, "The last step that the task has reported.", ("task",))
TASK_SPEED = Family("paceline_task_steps_per_second", GAUGE, "Steps per second, as last measured.", ("task",))
REPORTED = Family("paceline_reported", GAUGE, "A number that the task has reported.", ("task", "name"), most=4_000)

SNAPSHOT_STEP = Family("paceline_snapshot_step", GAUGE, "The step of the newest snapshot.", ("state",))
SNAPSHOT_AGE = Family("paceline_snapshot_age_seconds", GAUGE, "Time since the newest snapshot was saved.", ("state",))
SNAPSHOT_SIZE = Family("paceline_snapshot_size_bytes", GAUGE, "Size of the newest committed snapshot.")
COMMIT_TIME = Family(
    "paceline_snapshot_commit_seconds", GAUGE, "Time until the newest committed snapshot was committed, once saved."
)
STALL = Family("paceline_snapshot_stall_seconds", GAUGE, "How long training waited for the newest saved snapshot.")
SKIPPED = Family(
    "paceline_snapshots_skipped", COUNTER, "Saved snapshots that were not committed, because newer ones were."
)
HELD = Family("paceline_snapshots_held", GAUGE, "Snapshots that are on hosts, complete or not.")
OWED = Family("paceline_generation_records_owed", GAUGE, "Records of generations that are not in the store yet.")

HOST_UP = Family("paceline_host_up", GAUGE, "1 while the host is connected to the captain.", ("host",))
LEASE_AGE = Family("paceline_host_lease_age_seconds", GAUGE, "Time since the lease was last renewed.", ("host",))
LEASE = Family("paceline_lease_seconds", GAUGE, "Time after which a host without a message counts as lost.")

TASK_CPU = Family("paceline_task_cpu_cores", GAUGE, "Cores that the task uses.", ("task",))
TASK_MEMORY = Family("paceline_task_memory_bytes", GAUGE, "Memory that the task uses.", ("task",))
TASK_MEMORY_PEAK = Family("paceline_task_memory_peak_bytes", GAUGE, "Most memory that the task has used.", ("task",))
TASK_READ = Family("paceline_task_read_bytes_per_second", GAUGE, "What the task reads from disks.", ("task",))
TASK_WRITTEN = Family("paceline_task_written_bytes_per_second", GAUGE, "What the task writes to disks.", ("task",))
HOST_MEMORY = Family("paceline_host_memory_bytes", GAUGE, "Memory in use on the host.", ("host",))
HOST_MEMORY_LIMIT = Family("paceline_host_memory_limit_bytes", GAUGE, "Memory that the host may use.", ("host",))
HOST_RECEIVED = Family("paceline_host_received_bytes_per_second", GAUGE, "What the host receives.", ("host",))
HOST_SENT = Family("paceline_host_sent_bytes_per_second", GAUGE, "What the host sends.", ("host",))
GPU_BUSY = Family("paceline_gpu_utilization_ratio", GAUGE, "Fraction of time the GPU is busy.", ("host", "gpu"))
GPU_MEMORY = Family("paceline_gpu_memory_bytes", GAUGE, "Memory in use on the GPU.", ("host", "gpu"))
GPU_MEMORY_LIMIT = Family("paceline_gpu_memory_limit_bytes", GAUGE, "Memory of the GPU.", ("host", "gpu"))

EVALUATOR_LAG = Family(
    "paceline_evaluator_lag_steps", GAUGE, "Steps between the newest committed and the newest evaluated snapshot."
)
UNEVALUATED = Family("paceline_snapshots_unevaluated", GAUGE, "Committed snapshots that wait for an evaluator.")

FAMILIES = (
    RUN, STATUS, STARTED, GENERATION, RESTARTS, TIME, GOODPUT, DISK_FREE, DISK_SIZE,
    STEP, SPEED, PROGRESS_AGE, TASK_UP, TASK_STEP, TASK_SPEED, REPORTED,
    SNAPSHOT_STEP, SNAPSHOT_AGE, SNAPSHOT_SIZE, COMMIT_TIME, STALL, SKIPPED, HELD, OWED,
    HOST_UP, LEASE_AGE, LEASE, EVALUATOR_LAG, UNEVALUATED,
    TASK_CPU, TASK_MEMORY, TASK_MEMORY_PEAK, TASK_READ, TASK_WRITTEN,
    HOST_MEMORY, HOST_MEMORY_LIMIT, HOST_RECEIVED, HOST_SENT, GPU_BUSY, GPU_MEMORY, GPU_MEMORY_LIMIT, LEFT_OUT,
)  # fmt: skip
