"""Every mistake in a job file, and its message."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import job
from paceline.job import planning

HEAD = "name: digits\nframework: torch\ncommand: [python, train.py]\n"
TENSORFLOW = "name: digits\nframework: tensorflow\ncommand: [python, train.py]\n"
SERVERS = "name: digits\nframework: tensorflow\nstrategy: parameter-server\n"
TIMES = 'allowed: a duration such as "90s", "10m", "6h", "1h30m" or "2d", or a number of seconds'
AMOUNTS = 'allowed: an amount such as "8Gi" or "512Mi" (1024), "8G" or "500M" (1000), or a number of bytes'
CORES = 'allowed: a number of cores such as 4 or 0.5, or millicores such as "500m"'
TOP = (
    "allowed: code, command, cpu, credentials, elastic, env, env_of, export, framework, gpus, ingest, kubernetes, "
    "limits, memory, metrics, name, notify, restart, roles, serve, snapshots, strategy, tensorboard, tensorflow, "
    "track, try"
)
LOCATIONS = (
    "allowed: a folder, a bucket (s3://bucket/path, gs://bucket/path, az://container/path), "
    "or on a cluster a volume claim (claim://name/path)"
)
GROUP = "allowed: command, cpu, env, gpus, max, memory, min, replicas, share, tasks_per_host"
NAMES = "allowed: a lowercase letter, then lowercase letters, digits and -, at most 40 characters"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("")
    (tmp_path / "pkg").mkdir()
    for name in ("__init__", "train"):
        (tmp_path / "pkg" / f"{name}.py").write_text("")
    return tmp_path


def load_error(text: str, folder: Path, *overrides: str) -> str:
    with pytest.raises(job.JobError) as caught:
        job.load_text(text, "job.yaml", folder, overrides)
    assert all(problem.message for problem in caught.value.problems)
    return str(caught.value).replace(str(folder), "FOLDER")


# (the text added to HEAD, the whole message)
FIELDS = {
    "variables of another system in a torch job": (
        "env_of: [jaxjob]\n",
        "job.yaml:4: env_of: has no effect in a torch job: only jax jobs have it; remove it\n    env_of: [jaxjob]",
    ),
    "variables of an unknown system": (
        "env_of: [jaxjbo]\n",
        'job.yaml:4: env_of.0: "jaxjbo" is not a valid value; did you mean "jaxjob"? allowed: jaxjob\n'
        "    env_of: [jaxjbo]",
    ),
    "variables of another system without a list": (
        "env_of: jaxjob\n",
        'job.yaml:4: env_of: must be a list of names, got the string "jaxjob"; write [jaxjob]\n    env_of: jaxjob',
    ),
    "unknown variable of Paceline in a value": (
        "env: {A: $PACELINE_TSK}\nroles:\n  worker: {env: {B: '${PACELINE_INDX}'}}\n",
        'job.yaml:4: env.A: $PACELINE_TSK is not a Paceline variable; did you mean "PACELINE_TASK"?\n'
        "    env: {A: $PACELINE_TSK}\n"
        'job.yaml:6: roles.worker.env.B: $PACELINE_INDX is not a Paceline variable; did you mean "PACELINE_INDEX"?\n'
        "      worker: {env: {B: '${PACELINE_INDX}'}}",
    ),
    "torchrun on each host separately": (
        "roles:\n  worker: {replicas: 2, command: [python, -m, torch.distributed.run, --standalone, train.py]}\n",
        "job.yaml:5: roles.worker.command.3: makes torchrun train on each host separately; "
        "remove it: Paceline sets defaults for torchrun with which all hosts train together\n"
        "      worker: {replicas: 2, command: [python, -m, torch.distributed.run, --standalone, train.py]}",
    ),
    "unknown key": (
        "roles:\n  worker: {replics: 3}\n",
        f'job.yaml:5: roles.worker.replics: unknown key "replics"; did you mean "replicas"? {GROUP}\n'
        "      worker: {replics: 3}",
    ),
    "unknown key at the top": (
        "comand: [a]\n",
        f'job.yaml:4: comand: unknown key "comand"; did you mean "command"? {TOP}\n    comand: [a]',
    ),
    "a key with a name that pydantic uses": (
        '"[key]": 1\nenv: {"[key]": a}\n',
        f'job.yaml:4: [key]: unknown key "[key]"; {TOP}\n    "[key]": 1\n'
        'job.yaml:5: env.[key]: "[key]" is not a valid variable name; did you mean "key"? '
        'allowed: letters, digits and _, not starting with a digit\n    env: {"[key]": a}',
    ),
    "key of another section": (
        "replicas: 2\n",
        f'job.yaml:4: replicas: unknown key "replicas"; did you mean "roles.worker.replicas"? {TOP}\n    replicas: 2',
    ),
    "key of the level above": (
        "restart: {memory: 8Gi}\n",
        'job.yaml:4: restart.memory: unknown key "memory"; did you mean "roles.worker.memory"? '
        "allowed: compile_cache, hang_after, limit, on_nan, scope, warm\n    restart: {memory: 8Gi}",
    ),
    "an unknown choice for NaN": (
        "restart: {on_nan: rolback}\n",
        'job.yaml:4: restart.on_nan: "rolback" is not a valid value; did you mean "rollback"? '
        "allowed: warn, stop, rollback\n    restart: {on_nan: rolback}",
    ),
    "another name for a choice for NaN": (
        "restart: {on_nan: fail}\n",
        'job.yaml:4: restart.on_nan: "fail" is not a valid value; did you mean "stop"? '
        "allowed: warn, stop, rollback\n    restart: {on_nan: fail}",
    ),
    "going back without a restart": (
        "restart: {on_nan: rollback, limit: 0}\n",
        "job.yaml:4: restart.on_nan: has no effect with limit: 0, which allows no restart; write on_nan: stop\n"
        "    restart: {on_nan: rollback, limit: 0}",
    ),
    "the choice for NaN at the top": (
        "on_nan: stop\n",
        f'job.yaml:4: on_nan: unknown key "on_nan"; did you mean "restart.on_nan"? {TOP}\n    on_nan: stop',
    ),
    "snapshots to another kind of bucket": (
        "snapshots: {to: gcs://training}\n",
        'job.yaml:4: snapshots.to: "gcs://" is not a supported location for snapshots; did you mean "gs://"? '
        f"{LOCATIONS}\n    snapshots: {{to: gcs://training}}",
    ),
    "snapshots to a bucket that lacks a slash": (
        "snapshots: {to: 's3:/training'}\n",
        'job.yaml:4: snapshots.to: needs two slashes after "s3:"; write s3://training, or ./s3:/training for a '
        f"folder of that name; {LOCATIONS}\n    snapshots: {{to: 's3:/training'}}",
    ),
    "snapshots without a bucket": (
        "snapshots: {to: 's3:///digits'}\n",
        f"job.yaml:4: snapshots.to: does not name a bucket; write s3://bucket/path; {LOCATIONS}\n    snapshots: {{to: 's3:///digits'}}",
    ),
    "a path that leads out of a bucket": (
        "snapshots: {to: 's3://training/../other'}\n",
        "job.yaml:4: snapshots.to: has an invalid path; separate names by a single /, without ., .., ? and #; "
        f"{LOCATIONS}\n    snapshots: {{to: 's3://training/../other'}}",
    ),
    "an ingest without a command": (
        "ingest: {to: data}\n",
        "job.yaml:4: ingest.command: is missing; write command: [python, ingest.py]\n    ingest: {to: data}",
    ),
    "an ingest without a location": (
        "ingest: {command: [python, train.py]}\n",
        "job.yaml:4: ingest.to: is missing; write to: s3://training/digits\n    ingest: {command: [python, train.py]}",
    ),
    "an ingest to another kind of bucket": (
        "ingest: {command: [python, train.py], to: gcs://data}\n",
        'job.yaml:4: ingest.to: "gcs://" is not a supported location for data; did you mean "gs://"? '
        f"{LOCATIONS}\n    ingest: {{command: [python, train.py], to: gcs://data}}",
    ),
    "an ingest with a missing script": (
        "ingest: {command: [python, trian.py], to: data}\n",
        'job.yaml:4: ingest.command.1: the script "trian.py" does not exist: looked in FOLDER; did you mean '
        '"train.py"?\n'
        "    ingest: {command: [python, trian.py], to: data}",
    ),
    "a missing input": (
        "ingest: {command: [python, train.py], to: data, inputs: [train.py, $A, 's3://raw/a', 'raw/*']}\n",
        'job.yaml:4: ingest.inputs.3: no file matches "raw/*" in FOLDER\n'
        "    ingest: {command: [python, train.py], to: data, inputs: [train.py, $A, 's3://raw/a', 'raw/*']}",
    ),
    "inputs as one string": (
        "ingest: {command: [python, train.py], to: data, inputs: train.py}\n",
        'job.yaml:4: ingest.inputs: must be a list of files, got the string "train.py"; write [ingest.py, raw/*.txt]\n'
        "    ingest: {command: [python, train.py], to: data, inputs: train.py}",
    ),
    "an unused claim": (
        "snapshots: {claim: {size: 20Gi}}\n",
        "job.yaml:4: snapshots.claim: has no effect: snapshots.to is not a volume claim; "
        "write to: claim://snapshots, or remove claim\n    snapshots: {claim: {size: 20Gi}}",
    ),
    "a claim without a size": (
        "snapshots: {to: claim://digits, claim: {}}\n",
        "job.yaml:4: snapshots.claim.size: is missing; write size: 100Gi\n"
        "    snapshots: {to: claim://digits, claim: {}}",
    ),
    **{
        f"{path} as a folder of checkpoints": (
            f"snapshots: {{watch: {path}}}\n",
            "job.yaml:4: snapshots.watch: is not a valid place of checkpoints; use a folder below the working folder "
            "(ckpt/), a file (snapshot.pt) or a pattern of names (*.pt); "
            f"allowed: a folder, a file, or a pattern of names of files\n    snapshots: {{watch: {path}}}",
        )
        for path in (".", "a/../../b", "~/ckpt", "s3://bucket/ckpt")
    },
    **{
        f"{path} as a pattern of checkpoints": (
            f"snapshots: {{watch: '{path}'}}\n",
            "job.yaml:4: snapshots.watch: has a pattern in the name of a folder; use a pattern only for names of "
            "files; "
            f"allowed: a folder, a file, or a pattern of names of files\n    snapshots: {{watch: '{path}'}}",
        )
        for path in ("run-*/model.pt", "**", "ckpt/**.pt")
    },
    **{
        f"{path} as a pattern of all files": (
            f"snapshots: {{watch: '{path}'}}\n",
            "job.yaml:4: snapshots.watch: matches all files, and a restart replaces the files that match; use a part "
            "of the names of checkpoints, such as *.pt; "
            f"allowed: a folder, a file, or a pattern of names of files\n    snapshots: {{watch: '{path}'}}",
        )
        for path in ("*", "*.*", "out/[a-z]*")
    },
    "a second copy of snapshots": (
        "snapshots: {mirror: true}\n",
        'job.yaml:4: snapshots.mirror: unknown key "mirror"; remove it: on a cluster, the hosts that wrote the newest '
        "snapshot keep a copy automatically; allowed: best, claim, commit_every, from, keep, memory, rate, to, trust, "
        "watch\n    snapshots: {mirror: true}",
    ),
    "snapshots in no memory": (
        "snapshots: {memory: 0}\n",
        'job.yaml:4: snapshots.memory: must be at least 1Mi, got 0; allowed: an amount such as "8Gi" or "512Mi" '
        '(1024), "8G" or "500M" (1000), or a number of bytes\n    snapshots: {memory: 0}',
    ),
    "snapshots in memory, without a unit": (
        "snapshots: {memory: 8}\n",
        'job.yaml:4: snapshots.memory: must be at least 1Mi, got 8; did you mean "8Gi"? allowed: an amount such as '
        '"8Gi" or "512Mi" (1024), "8G" or "500M" (1000), or a number of bytes\n    snapshots: {memory: 8}',
    ),
    "snapshots in an amount of memory that is none": (
        "snapshots: {memory: half}\n",
        'job.yaml:4: snapshots.memory: "half" is not an amount of memory; allowed: an amount such as "8Gi" '
        'or "512Mi" (1024), "8G" or "500M" (1000), or a number of bytes\n    snapshots: {memory: half}',
    ),
    "a watched folder and snapshots in memory": (
        "snapshots: {watch: ckpt, memory: 8Gi}\n",
        "job.yaml:4: snapshots.memory: has no effect with snapshots.watch: what the program keeps there is copied to "
        "disk; remove one of them\n    snapshots: {watch: ckpt, memory: 8Gi}",
    ),
    "no snapshot is kept": (
        "snapshots: {keep: 0}\n",
        "job.yaml:4: snapshots.keep: must be at least 1, got 0; allowed: a whole number of at least 1\n"
        "    snapshots: {keep: 0}",
    ),
    "the best without a metric": (
        "snapshots: {best: {mode: max}}\n",
        "job.yaml:4: snapshots.best.metric: is missing; write metric: loss\n    snapshots: {best: {mode: max}}",
    ),
    "the best by a number": (
        "snapshots: {best: {metric: 3, mode: lowest}}\n",
        'job.yaml:4: snapshots.best.metric: must be a string, got the number 3; write "3"\n'
        "    snapshots: {best: {metric: 3, mode: lowest}}\n"
        'job.yaml:4: snapshots.best.mode: "lowest" is not a valid value; did you mean "min"? allowed: min, max\n'
        "    snapshots: {best: {metric: 3, mode: lowest}}",
    ),
    "no replicas": (
        "roles: {worker: {replicas: 0}}\n",
        "job.yaml:4: roles.worker.replicas: must be at least 1, got 0; allowed: a whole number from 1 to 100000\n"
        "    roles: {worker: {replicas: 0}}",
    ),
    "negative replicas in a list": (
        "roles:\n  worker:\n    - {replicas: 1}\n    - replicas: -2\n",
        "job.yaml:7: roles.worker.1.replicas: must be at least 1, got -2; allowed: a whole number from 1 to 100000\n"
        "        - replicas: -2",
    ),
    "too many replicas": (
        "roles: {worker: {replicas: 100001}}\n",
        "job.yaml:4: roles.worker.replicas: must be at most 100000, got 100001; "
        "allowed: a whole number from 1 to 100000\n    roles: {worker: {replicas: 100001}}",
    ),
    "text for a number": (
        'roles: {worker: {replicas: "2"}}\n',
        'job.yaml:4: roles.worker.replicas: must be a whole number, got the string "2"; write it without quotes; '
        'allowed: a whole number from 1 to 100000\n    roles: {worker: {replicas: "2"}}',
    ),
    "half a GPU": (
        "gpus: 0.5\n",
        "job.yaml:4: gpus: must be a whole number, got the number 0.5; allowed: a whole number from 0 to 1024\n"
        "    gpus: 0.5",
    ),
    "true for a number": (
        "gpus: true\n",
        "job.yaml:4: gpus: must be a whole number, got true; allowed: a whole number from 0 to 1024\n    gpus: true",
    ),
    "too many tasks": (
        "roles: {worker: {replicas: 100000, tasks_per_host: 8}}\n",
        "job.yaml:4: roles: would create 800000 tasks; a job can have at most 100000\n"
        "    roles: {worker: {replicas: 100000, tasks_per_host: 8}}",
    ),
    "a role that is a number": (
        "roles: {worker: 3}\n",
        "job.yaml:4: roles.worker: must be a mapping or a list of mappings, got the number 3; write {replicas: 3}\n"
        "    roles: {worker: 3}",
    ),
    "a role without groups": (
        "roles: {worker: []}\n",
        "job.yaml:4: roles.worker: is an empty list: a role needs at least one host pool\n    roles: {worker: []}",
    ),
    "a group that is text": (
        "roles: {worker: [a]}\n",
        f'job.yaml:4: roles.worker.0: must be a mapping, got the string "a"; {GROUP}\n    roles: {{worker: [a]}}',
    ),
    "roles that are a list": (
        "roles: [worker]\n",
        "job.yaml:4: roles: must be a mapping, got a list; write roles: {worker: {replicas: 2}}\n    roles: [worker]",
    ),
    "no roles": (
        "roles: {}\n",
        "job.yaml:4: roles: is empty; remove it to run one worker, or write {worker: {replicas: 2}}\n    roles: {}",
    ),
    "chief in a torch job": (
        "roles: {worker: {}, chief: {}}\n",
        'job.yaml:4: roles.chief: a torch job has no role "chief"; allowed: worker, evaluator\n'
        "    roles: {worker: {}, chief: {}}",
    ),
    "unknown role": (
        "roles: {workers: {}}\n",
        'job.yaml:4: roles.workers: unknown role "workers"; did you mean "worker"? allowed: worker, evaluator\n'
        "    roles: {workers: {}}",
    ),
    "strategy without effect": (
        "strategy: multi-worker\n",
        "job.yaml:4: strategy: has no effect in a torch job: only tensorflow jobs have a strategy; remove it\n"
        "    strategy: multi-worker",
    ),
    "tensorflow without effect": (
        "tensorflow: {patch_keras: false}\n",
        "job.yaml:4: tensorflow: has no effect in a torch job; remove it\n    tensorflow: {patch_keras: false}",
    ),
    "unknown strategy": (
        "strategy: MultiWorkerMirroredStrategy\n",
        'job.yaml:4: strategy: "MultiWorkerMirroredStrategy" is not a valid value; did you mean "multi-worker"? '
        "allowed: multi-worker, parameter-server\n    strategy: MultiWorkerMirroredStrategy",
    ),
    "groups with other commands": (
        "roles:\n  worker:\n    - {replicas: 1}\n    - {command: [python, train.py, -x]}\n",
        "job.yaml:7: roles.worker.1.command: differs from the first host pool: all host pools of a role must "
        "have the same command; use the same command in every host pool of worker\n"
        "        - {command: [python, train.py, -x]}",
    ),
    "groups with other variables": (
        "roles:\n  worker:\n    - {env: {A: b}}\n    - {replicas: 2}\n",
        "job.yaml:7: roles.worker.1.env: differs from the first host pool: all host pools of a role must have "
        "the same env; use the same env in every host pool of worker\n        - {replicas: 2}",
    ),
    "memory": (
        "memory: 8G b\n",
        f'job.yaml:4: memory: "8G b" is not an amount of memory; did you mean "8G"? {AMOUNTS}\n    memory: 8G b',
    ),
    "memory in GB": (
        "memory: 8GiB\n",
        f'job.yaml:4: memory: "8GiB" is not an amount of memory; did you mean "8Gi"? {AMOUNTS}\n    memory: 8GiB',
    ),
    "eight bytes": (
        "memory: 8\n",
        f'job.yaml:4: memory: must be at least 1Mi, got 8; did you mean "8Gi"? {AMOUNTS}\n    memory: 8',
    ),
    "memory as a list": (
        "memory: [8Gi]\n",
        f"job.yaml:4: memory: must be an amount of memory, got a list; {AMOUNTS}\n    memory: [8Gi]",
    ),
    "too much memory": (
        "memory: 9999Pi\n",
        f'job.yaml:4: memory: must be at most 1024Pi, got "9999Pi"; {AMOUNTS}\n    memory: 9999Pi',
    ),
    "cpu": (
        "cpu: 4 cores\n",
        f'job.yaml:4: cpu: "4 cores" is not a number of cores; did you mean 4? {CORES}\n    cpu: 4 cores',
    ),
    "no cpu": ("cpu: 0\n", f"job.yaml:4: cpu: must be at least 0.001, got 0; {CORES}\n    cpu: 0"),
    "infinite cpu": ("cpu: .inf\n", f"job.yaml:4: cpu: must be at most 100000, got inf; {CORES}\n    cpu: .inf"),
    "duration": (
        "limits: {start: soon}\n",
        f'job.yaml:4: limits.start: "soon" is not a duration; {TIMES}\n    limits: {{start: soon}}',
    ),
    "duration in words": (
        "limits: {start: 5 minutes}\n",
        f'job.yaml:4: limits.start: "5 minutes" is not a duration; did you mean "5m"? {TIMES}\n'
        "    limits: {start: 5 minutes}",
    ),
    "duration as a clock": (
        "limits: {start: 1:30}\n",
        f'job.yaml:4: limits.start: "1:30" is not a duration; did you mean "1h30m"? {TIMES}\n    limits: '
        f"{{start: 1:30}}",
    ),
    "duration of zero": (
        "limits: {grace: 0s}\n",
        f'job.yaml:4: limits.grace: must be longer than 0 seconds, got "0s"; {TIMES}\n    limits: {{grace: 0s}}',
    ),
    "time for an evaluation without an evaluator": (
        "limits: {evaluation: 1h}\n",
        "job.yaml:4: limits.evaluation: has no effect: the job has no evaluator; remove it\n"
        "    limits: {evaluation: 1h}",
    ),
    "negative duration": (
        "restart: {hang_after: -5}\n",
        f"job.yaml:4: restart.hang_after: must be longer than 0 seconds, got -5; {TIMES}\n"
        "    restart: {hang_after: -5}",
    ),
    "infinite duration": (
        "limits: {runtime: .inf}\n",
        f"job.yaml:4: limits.runtime: must be at most 3650d, got inf; {TIMES}\n    limits: {{runtime: .inf}}",
    ),
    "yes for true": (
        "restart: {warm: yes}\n",
        'job.yaml:4: restart.warm: must be true or false, got the string "yes"; write true; allowed: true, false\n'
        "    restart: {warm: yes}",
    ),
    "a variable that is a number": (
        "env: {SEED: 07}\n",
        'job.yaml:4: env.SEED: must be a string, got the number 7; write "07"\n    env: {SEED: 07}',
    ),
    "a variable's name": (
        "env: {my-seed: a}\n",
        'job.yaml:4: env.my-seed: "my-seed" is not a valid variable name; did you mean "my_seed"? '
        "allowed: letters, digits and _, not starting with a digit\n    env: {my-seed: a}",
    ),
    "a reserved variable": (
        'env: {TF_CONFIG: "{}", PACELINE_RUN: a}\n',
        'job.yaml:4: env.TF_CONFIG: "TF_CONFIG" is set by Paceline for each task; remove it\n'
        '    env: {TF_CONFIG: "{}", PACELINE_RUN: a}\n'
        'job.yaml:4: env.PACELINE_RUN: "PACELINE_RUN" is set by Paceline for each task; remove it\n'
        '    env: {TF_CONFIG: "{}", PACELINE_RUN: a}',
    ),
    "a reserved variable in a role": (
        'roles: {worker: {env: {RANK: "1"}}}\n',
        'job.yaml:4: roles.worker.env.RANK: "RANK" is set by Paceline for each task; remove it\n'
        '    roles: {worker: {env: {RANK: "1"}}}',
    ),
    "a section that is text": (
        "limits: 6h\n",
        'job.yaml:4: limits: must be a mapping, got the string "6h"; '
        "allowed: commit, evaluation, grace, keep_finished, log, runtime, start\n    limits: 6h",
    ),
    "variables that are a list": (
        "env: [A=b]\n",
        "job.yaml:4: env: must be a mapping, got a list; write env: {NAME: value}\n    env: [A=b]",
    ),
    "a role without a value": (
        "roles:\n  worker:\n",
        "job.yaml:5: roles.worker: has no value; write worker: {} for one host\n      worker:",
    ),
    "a key without a value": (
        "limits:\n",
        "job.yaml:4: limits: has no value; give it a value, or remove the key\n    limits:",
    ),
    "a date": (
        "env: {DAY: 2026-01-02}\n",
        'job.yaml:4: env.DAY: 2026-01-02 is read as a date by YAML; write "2026-01-02"\n    env: {DAY: 2026-01-02}',
    ),
    "an image with a space": (
        "kubernetes: {image: a b}\n",
        'job.yaml:4: kubernetes.image: "a b" is not a valid image name: it contains a space\n'
        "    kubernetes: {image: a b}",
    ),
    "a namespace": (
        "kubernetes: {namespace: Team_A}\n",
        'job.yaml:4: kubernetes.namespace: "Team_A" is not a valid name; did you mean "team-a"? '
        "allowed: lowercase letters, digits and -, at most 63 characters\n    kubernetes: {namespace: Team_A}",
    ),
    "a missing folder": (
        "code: script\n",
        'job.yaml:4: code: the folder "script" does not exist: looked for FOLDER/script; did you mean "scripts"?\n'
        "    code: script",
    ),
    "almost the word image": (
        "code: imge\n",
        'job.yaml:4: code: the folder "imge" does not exist: looked for FOLDER/imge; did you mean "image"?\n'
        "    code: imge",
    ),
    "a missing folder named image": (
        "code: ./image\n",
        'job.yaml:4: code: the folder "./image" does not exist: looked for FOLDER/image\n    code: ./image',
    ),
    "try without a command": (
        "try: {}\n",
        "job.yaml:4: try.command: is missing; write command: [python, translate.py]\n    try: {}",
    ),
    "export as a list": (
        "export: [python, export.py]\n",
        "job.yaml:4: export: must be a mapping, got a list; write export: {command: [python, export.py]}; "
        "allowed: command\n    export: [python, export.py]",
    ),
    "try as a line of text": (
        "try: {command: python translate.py}\n",
        "job.yaml:4: try.command: must be a list of arguments, got a single string; write [python, translate.py]\n"
        "    try: {command: python translate.py}",
    ),
    "export with another key": (
        "export: {command: [python, train.py], to: /models}\n",
        'job.yaml:4: export.to: unknown key "to"; did you mean "snapshots.to"? allowed: command\n'
        "    export: {command: [python, train.py], to: /models}",
    ),
    "scripts that cannot run": (
        "try: {command: [python, tran.py]}\nexport: {command: [./run.sh]}\n",
        'job.yaml:4: try.command.1: the script "tran.py" does not exist: looked in FOLDER; did you mean "train.py"?\n'
        "    try: {command: [python, tran.py]}\n"
        'job.yaml:5: export.command.0: the program "./run.sh" is not executable; run chmod +x ./run.sh\n'
        "    export: {command: [./run.sh]}",
    ),
    "serve without export": (
        "serve: {image: team/serve}\n",
        "job.yaml:4: serve: has no effect without export, which creates the model from a snapshot; write export: "
        "{command: [python, export.py]}\n    serve: {image: team/serve}",
    ),
    "serve without an image, of another framework than tensorflow": (
        "export: {command: [python, train.py]}\nserve: {replicas: 2}\n",
        "job.yaml:5: serve.image: is missing: only tensorflow has a default image for serving; "
        "name an image that contains paceline[serve] and torch\n    serve: {replicas: 2}",
    ),
    "serve with a wrong image and a broken export": (
        "export: {}\nserve: {image: a b, replicas: 0}\n",
        "job.yaml:4: export.command: is missing; write command: [python, export.py]\n    export: {}\n"
        'job.yaml:5: serve.image: "a b" is not a valid image name: it contains a space\n'
        "    serve: {image: a b, replicas: 0}\n"
        "job.yaml:5: serve.replicas: must be at least 1, got 0; allowed: a whole number from 1 to 1000\n"
        "    serve: {image: a b, replicas: 0}",
    ),
    "another key of serve": (
        "export: {command: [python, train.py]}\nserve: {image: a, port: 80}\n",
        'job.yaml:5: serve.port: unknown key "port"; allowed: cpu, gpus, image, memory, replicas, service\n'
        "    serve: {image: a, port: 80}",
    ),
    "yes for tensorboard": (
        "tensorboard: on\n",
        'job.yaml:4: tensorboard: must be true, false or a mapping, got the string "on"; write true; allowed: true, '
        "false, a mapping\n    tensorboard: on",
    ),
    "another service for tensorboard": (
        "tensorboard: {service: nodeport}\n",
        'job.yaml:4: tensorboard.service: "nodeport" is not a valid value; did you mean "NodePort"? allowed: '
        "ClusterIP, "
        "NodePort, LoadBalancer\n    tensorboard: {service: nodeport}",
    ),
    "an ingress without its host": (
        "tensorboard:\n  ingress: {class: nginx}\n",
        "job.yaml:5: tensorboard.ingress.host: is missing; write host: digits.example.com\n"
        "      ingress: {class: nginx}",
    ),
    "an unknown key of tensorboard": (
        "tensorboard: {imag: a}\n",
        'job.yaml:4: tensorboard.imag: unknown key "imag"; did you mean "image"? allowed: image, ingress, memory, '
        "service\n    tensorboard: {imag: a}",
    ),
    "an unknown key of an ingress": (
        "tensorboard: {ingress: {host: a.b, name: c}}\n",
        'job.yaml:4: tensorboard.ingress.name: unknown key "name"; did you mean "name", one level up? allowed: class, '
        "host, tls\n    tensorboard: {ingress: {host: a.b, name: c}}",
    ),
    "a time to keep": (
        "limits: {keep_finished: forever}\n",
        f'job.yaml:4: limits.keep_finished: "forever" is not a duration; {TIMES}\n    limits: '
        f"{{keep_finished: forever}}",
    ),
    "a folder that is a file": (
        "code: train.py\n",
        'job.yaml:4: code: the folder "train.py" is a file, not a folder: looked for FOLDER/train.py\n'
        "    code: train.py",
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_wrong_field(case: str, folder: Path) -> None:
    added, message = FIELDS[case]
    assert load_error(HEAD + added, folder) == message


# (the command, the message after "job.yaml:3: ")
COMMANDS = {
    "one string": (
        "python train.py --epochs 20",
        'command: must be a list of arguments, got a single string; write [python, train.py, --epochs, "20"]',
    ),
    "a number": (
        "[python, train.py, 20]",
        'command.2: must be a string, got the number 20; write "20"',
    ),
    "a number as written": (
        "[python, train.py, 1e-3]",
        'command.2: must be a string, got the number 0.001; write "1e-3"',
    ),
    "a switch": ("[python, train.py, true]", 'command.2: must be a string, got true; write "true"'),
    "an empty word": ('[python, train.py, ""]', "command.2: is empty"),
    "empty": ("[]", "command: is empty; write what to run, such as [python, train.py]"),
    "a mapping": ("{a: b}", "command: must be a list of arguments, got a mapping; write [python, train.py]"),
    "missing script": (
        "[python, -u, trian.py]",
        'command.2: the script "trian.py" does not exist: looked in FOLDER; did you mean "train.py"?',
    ),
    "missing script in a folder": (
        "[python3, scripts/trian.py]",
        'command.1: the script "scripts/trian.py" does not exist: looked in FOLDER/scripts; '
        'did you mean "scripts/train.py"?',
    ),
    "script that is a folder": (
        "[python, scripts]",
        'command.1: the script "scripts" is a folder; did you mean "scripts/train.py"?',
    ),
    "missing module": (
        "[python, -m, pkg.trian]",
        'command.2: the module "pkg.trian" does not exist: looked in FOLDER/pkg; did you mean "pkg.train"?',
    ),
    "package without main": (
        "[python, -m, pkg]",
        'command.2: "pkg" is a package without a __main__.py: Python cannot run it',
    ),
    "Python alone": ("[python]", "command.0: runs Python without a script: a task cannot read one from standard input"),
    "unknown program": ("[bsah, run.sh]", 'command.0: the program "bsah" was not found on PATH; did you mean "bash"?'),
    "script as program": (
        "[train.py]",
        'command.0: the program "train.py" was not found on PATH; did you mean [python, train.py]?',
    ),
    "program of the folder": (
        "[run.sh]",
        'command.0: the program "run.sh" was not found on PATH; did you mean "./run.sh"?',
    ),
    "program that is not executable": (
        "[./run.sh]",
        'command.0: the program "./run.sh" is not executable; run chmod +x ./run.sh',
    ),
    "program that is a folder": ("[./scripts]", 'command.0: the program "./scripts" is a folder'),
    "missing program of the folder": (
        "[./rn.sh]",
        'command.0: the program "./rn.sh" does not exist: looked in FOLDER; did you mean "./run.sh"?',
    ),
    "unknown variable": (
        "[python, train.py, --rank=$PACELINE_RNAK]",
        'command.2: $PACELINE_RNAK is not a Paceline variable; did you mean "PACELINE_RANK"?',
    ),
    "variable of one's own that looks like Paceline's": (
        "[python, train.py, '${PACELINE_NOTHING_LIKE_IT_AT_ALL}']",
        "command.2: $PACELINE_NOTHING_LIKE_IT_AT_ALL is not a Paceline variable; "
        "write $$PACELINE_NOTHING_LIKE_IT_AT_ALL for the text itself",
    ),
    "all words in one": (
        '["python train.py"]',
        'command.0: the program "python train.py" was not found on PATH; write each argument as a separate item',
    ),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_wrong_command(case: str, folder: Path) -> None:
    command, message = COMMANDS[case]
    text = f"name: digits\nframework: torch\ncommand: {command}\n"
    assert load_error(text, folder) == f"job.yaml:3: {message}\n    command: {command}"


GOOD_COMMANDS = (
    "[python, train.py]",
    "[python3, -u, -W, ignore, train.py]",
    "[python, -X, dev, scripts/train.py]",
    "[python, app]",
    "[python, -m, pkg.train]",
    "[python, -m, some_installed_package.train]",
    "[python, -um, pkg.train]",
    "[python, -c, print(1)]",
    "[sh, run.sh]",
    "[/bin/sh, run.sh]",
    "[python, train.py, $PACELINE_RANK, $HOME, $$PACELINE_X]",
    "[sh, -c, 'PACELINE_X=1; echo $PACELINE_X $$']",
    "[python, $PACELINE_DATA/train.py]",
)


@pytest.mark.parametrize("command", GOOD_COMMANDS)
def test_a_valid_command(command: str, folder: Path) -> None:
    job.load_text(f"name: digits\nframework: torch\ncommand: {command}\n", "job.yaml", folder)


# (the whole text, the whole message)
JOBS = {
    "a patch for a Keras that is not used": (
        TENSORFLOW + "tensorflow: {patch_keras: true, keras: legacy}\n",
        "job.yaml:4: tensorflow.patch_keras: has no effect with keras: legacy, which is not patched; "
        "remove one of them\n"
        "    tensorflow: {patch_keras: true, keras: legacy}",
    ),
    "an unknown Keras": (
        TENSORFLOW + "tensorflow: {keras: tf_keras}\n",
        'job.yaml:4: tensorflow.keras: "tf_keras" is not a valid value; did you mean "legacy"? allowed: legacy\n'
        "    tensorflow: {keras: tf_keras}",
    ),
    "ps under multi-worker": (
        TENSORFLOW + "roles: {worker: {}, ps: {}}\n",
        'job.yaml:4: roles.ps: a tensorflow job with strategy multi-worker has no role "ps"; '
        'did you mean "strategy: parameter-server"? allowed: chief, worker, evaluator\n'
        "    roles: {worker: {}, ps: {}}",
    ),
    "two chiefs": (
        TENSORFLOW + "roles: {worker: {}, chief: {replicas: 2}}\n",
        "job.yaml:4: roles.chief.replicas: a job must have exactly one chief, got 2; allowed: 1\n"
        "    roles: {worker: {}, chief: {replicas: 2}}",
    ),
    "a chief on two GPUs": (
        TENSORFLOW + "gpus: 2\nroles: {worker: {}, chief: {}}\n",
        "job.yaml:4: gpus: a job must have exactly one chief, but this creates 2 chief tasks, one per GPU; "
        "write tasks_per_host: 1 in roles.chief\n    gpus: 2",
    ),
    "only an evaluator": (
        TENSORFLOW + "roles: {evaluator: {}}\n",
        'job.yaml:4: roles: has no "worker": no task would train; add worker: {replicas: 1}\n'
        "    roles: {evaluator: {}}",
    ),
    "a watched folder without a chief": (
        SERVERS + "command: [python, train.py]\nroles: {worker: {}, ps: {}}\nsnapshots: {watch: ckpt/}\n",
        "job.yaml:6: snapshots.watch: has no effect: a parameter-server job watches the chief's folder, and this job "
        "has no chief; add roles.chief, or remove it\n    snapshots: {watch: ckpt/}",
    ),
    "parameter-server without ps": (
        SERVERS + "command: [python, train.py]\nroles: {worker: {}}\n",
        'job.yaml:5: roles: a tensorflow job with strategy parameter-server needs at least one "ps"; '
        "add ps: {replicas: 1}\n    roles: {worker: {}}",
    ),
    "parameter-server without roles": (
        SERVERS + "command: [python, train.py]\n",
        'job.yaml: roles: a tensorflow job with strategy parameter-server needs at least one "ps"; '
        "add ps: {replicas: 1}",
    ),
    "parameter-server without workers": (
        SERVERS + "command: [python, train.py]\nroles: {chief: {}, ps: {}}\n",
        'job.yaml:5: roles: a tensorflow job with strategy parameter-server needs at least one "worker"; '
        "add worker: {replicas: 1}\n    roles: {chief: {}, ps: {}}",
    ),
    "no command for the workers, without a chief": (
        SERVERS + "roles: {worker: {}, ps: {}}\n",
        "job.yaml: command: is missing: there is nothing to run; write command: [python, train.py]",
    ),
    "a command for the ps only, without a chief": (
        SERVERS + "roles:\n  worker: {}\n  ps: {command: [python, train.py]}\n",
        "job.yaml:5: roles.worker.command: is missing, and the job has no command either; "
        "write command: [python, train.py]\n      worker: {}",
    ),
    "no command for the evaluator": (
        SERVERS + "roles:\n  chief: {command: [python, train.py]}\n  worker: {}\n  ps: {}\n  evaluator: {}\n",
        "job.yaml:8: roles.evaluator.command: is missing, and the job has no command either; "
        "write command: [python, train.py]\n      evaluator: {}",
    ),
    "nothing but a name": (
        "name: digits\n",
        "job.yaml: framework: is missing; write framework: none for a program without a framework; "
        "allowed: tensorflow, torch, jax, none\n"
        "job.yaml: command: is missing: there is nothing to run; write command: [python, train.py]",
    ),
    "no name": (
        "framework: torch\ncommand: [python, train.py]\n",
        "job.yaml: name: is missing; write name: digits",
    ),
    "a name": (
        "name: My Job\nframework: torch\ncommand: [python, train.py]\n",
        f'job.yaml:1: name: "My Job" is not a valid name; did you mean "my-job"? {NAMES}\n    name: My Job',
    ),
    "a long name": (
        f"name: {'a' * 41}\nframework: torch\ncommand: [python, train.py]\n",
        f'job.yaml:1: name: "{"a" * 41}" is 41 characters long; {NAMES}\n    name: {"a" * 41}',
    ),
    "a number as name": (
        "name: 7\nframework: torch\ncommand: [python, train.py]\n",
        f'job.yaml:1: name: must be a string, got the number 7; write "7"; {NAMES}\n    name: 7',
    ),
    "a framework": (
        "name: a\nframework: pytorch\ncommand: [python, train.py]\n",
        'job.yaml:2: framework: "pytorch" is not a valid value; did you mean "torch"? '
        "allowed: tensorflow, torch, jax, none\n    framework: pytorch",
    ),
    "a short framework": (
        "name: a\nframework: TF\ncommand: [python, train.py]\n",
        'job.yaml:2: framework: "TF" is not a valid value; did you mean "tensorflow"? '
        "allowed: tensorflow, torch, jax, none\n    framework: TF",
    ),
}


@pytest.mark.parametrize("case", JOBS)
def test_a_wrong_job(case: str, folder: Path) -> None:
    text, message = JOBS[case]
    assert load_error(text, folder) == message


def test_several_mistakes_are_reported_together_in_line_order(folder: Path) -> None:
    text = (
        "name: A\nframework: torch\nstrategy: multi-worker\ncommand: [python, trian.py, 3]\n"
        "roles:\n  worker: {replics: 3, replicas: 0}\n  chief: {}\nmemory: 8G b\n"
    )
    with pytest.raises(job.JobError) as caught:
        job.load_text(text, "job.yaml", folder, ["limits.grace=0", "nonsense"])
    problems = caught.value.problems
    assert [(problem.line, problem.path) for problem in problems] == [
        (1, "name"),
        (3, "strategy"),
        (4, "command.1"),
        (4, "command.2"),
        (6, "roles.worker.replics"),
        (6, "roles.worker.replicas"),
        (7, "roles.chief"),
        (8, "memory"),
        (None, ""),
        (None, "limits.grace"),
    ]
    assert problems[2].column == 19
    assert problems[-1].file == "--set limits.grace=0"
    assert [str(problem) for problem in problems] == str(caught.value).replace("\n    ", "\0").replace(
        "\n", "\1"
    ).replace("\0", "\n    ").split("\1")


def test_one_mistake_is_not_reported_twice(folder: Path) -> None:
    text = "name: a\nframework: torh\ncommand: [python, train.py]\nroles: {ps: {}}\n"
    assert load_error(text, folder).count("job.yaml:") == 1


def test_terminal_control_characters_are_shown_escaped(folder: Path) -> None:
    error = load_error(HEAD + 'memory: "\\e[31m"\n', folder)
    assert "\x1b" not in error and '"\\u001b[31m" is not an amount' in error


def test_only_the_first_of_very_many_mistakes_are_shown(folder: Path) -> None:
    error = load_error(HEAD + "".join(f"k{number}: 1\n" for number in range(3000)), folder)
    assert error.splitlines()[0].startswith('job.yaml:4: k0: unknown key "k0"')
    assert error.splitlines()[-1] == "and 50 more problems"


def test_only_jax_and_torch_jobs_keep_what_they_compile(folder: Path) -> None:
    message = "has no effect in a tensorflow job with strategy multi-worker: only jax and torch jobs have it; remove it"
    assert load_error(TENSORFLOW + "restart: {compile_cache: true}\n", folder) == (
        f"job.yaml:4: restart.compile_cache: {message}\n    restart: {{compile_cache: true}}"
    )
    for framework in ("jax", "torch"):
        assert job.load_text(f"{HEAD.replace('torch', framework)}restart: {{compile_cache: false}}", "job.yaml", folder)


def test_a_parameter_server_job_without_a_chief_cannot_go_back(folder: Path) -> None:
    roles = "command: [python, train.py]\nroles: {worker: {}, ps: {}}\n"
    message = "rollback needs a chief in a parameter-server job: only it resumes from a snapshot"
    assert load_error(SERVERS + roles + "restart: {on_nan: rollback}\n", folder) == (
        f"job.yaml:6: restart.on_nan: {message}; add roles.chief, or write on_nan: stop\n"
        "    restart: {on_nan: rollback}"
    )
    for choice, more in (("rollback", ", chief: {}"), ("stop", ""), ("warn", "")):
        text = SERVERS + roles.replace(", ps: {}", f", ps: {{}}{more}") + f"restart: {{on_nan: {choice}}}\n"
        assert job.load_text(text, "job.yaml", folder).job.restart.on_nan == choice


WORKERS = "roles: {worker: {replicas: 3}}\n"


@pytest.mark.parametrize(
    ("head", "fields", "message"),
    [
        (
            HEAD,
            WORKERS + "restart: {scope: tasks}\n",
            'job.yaml:5: restart.scope: "tasks" is not a valid value; did you mean "task"? allowed: group, host, task\n'
            "    restart: {scope: tasks}",
        ),
        (
            HEAD,
            WORKERS + "restart: {scope: pod}\n",
            'job.yaml:5: restart.scope: "pod" is not a valid value; did you mean "host"? allowed: group, host, task\n'
            "    restart: {scope: pod}",
        ),
        (
            HEAD,
            "restart: {scope: task}\n",
            "job.yaml:4: restart.scope: has no effect: the job has only one worker; remove it\n"
            "    restart: {scope: task}",
        ),
        (
            HEAD,
            "roles: {worker: {tasks_per_host: 4}}\nrestart: {scope: host}\n",
            "job.yaml:5: restart.scope: has no effect: the job has only one worker host; remove it\n"
            "    restart: {scope: host}",
        ),
        (
            HEAD,
            "roles: {worker: {replicas: 3, min: 2}}\nrestart: {scope: task}\n",
            "job.yaml:5: restart.scope: cannot be task for workers with min or max: their number changes only if "
            "the whole group restarts; remove it, or remove min and max\n    restart: {scope: task}",
        ),
        (
            HEAD,
            WORKERS + "restart: {scope: task, limit: 0}\n",
            "job.yaml:5: restart.scope: has no effect with limit: 0, which allows no restart; remove it\n"
            "    restart: {scope: task, limit: 0}",
        ),
        (
            HEAD,
            WORKERS + "restart: {scope: host, on_nan: rollback}\n",
            "job.yaml:5: restart.scope: cannot be host with on_nan: rollback, which restarts the whole group; remove "
            "it, or write on_nan: stop\n    restart: {scope: host, on_nan: rollback}",
        ),
        (
            HEAD,
            WORKERS + "restart: {scope: task}\nsnapshots: {watch: ckpt}\n",
            "job.yaml:5: restart.scope: cannot be task with snapshots.watch: its folder can be restored only while "
            "no task uses it; remove one of them\n    restart: {scope: task}",
        ),
        (
            TENSORFLOW,
            WORKERS + "restart: {scope: task}\n",
            "job.yaml:5: restart.scope: cannot be task in a tensorflow job with strategy multi-worker: a task cannot "
            "rejoin its collectives; remove it, or write framework: none if the tasks do not train together through "
            "tf.distribute\n    restart: {scope: task}",
        ),
        (
            SERVERS + "command: [python, train.py]\n",
            "roles: {worker: {replicas: 3}, ps: {}}\nrestart: {scope: group}\n",
            "job.yaml:6: restart.scope: has no effect in a tensorflow job with strategy parameter-server: its workers "
            "always restart individually; remove it\n    restart: {scope: group}",
        ),
        (
            HEAD.replace("torch", "jax"),
            WORKERS + "restart: {scope: host}\n",
            "job.yaml:5: restart.scope: cannot be host in a jax job: JAX ends all processes of a group if one of them "
            "dies; remove it, or write framework: none if the tasks do not train together through jax.distributed\n"
            "    restart: {scope: host}",
        ),
    ],
)
def test_mistakes_in_what_restarts(folder: Path, head: str, fields: str, message: str) -> None:
    assert load_error(head + fields, folder) == message


@pytest.mark.parametrize("framework", ["torch", "none"])
@pytest.mark.parametrize("scope", ["group", "host", "task"])
def test_what_restarts_can_be_chosen_if_the_program_may_tolerate_losses(
    folder: Path, framework: str, scope: str
) -> None:
    text = HEAD.replace("torch", framework) + WORKERS + f"restart: {{scope: {scope}}}\n"
    assert job.load_text(text, "job.yaml", folder).job.restart.scope == scope


def test_each_torchrun_may_train_separately_if_hosts_restart_on_their_own(folder: Path) -> None:
    text = HEAD.replace("[python,", "[torchrun, --standalone,") + WORKERS + "restart: {scope: host}\n"
    assert job.load_text(text, "job.yaml", folder).job.restart.scope == "host"


ELASTIC = "name: a\nframework: torch\ncommand: [python, train.py]\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            "roles: {worker: {replicas: 2, min: 3}}\n",
            "job.yaml:4: roles.worker.min: is 3, but there are only 2 hosts (replicas); allowed: at most 2\n"
            "    roles: {worker: {replicas: 2, min: 3}}",
        ),
        (
            "roles: {worker: {}, evaluator: {min: 1}}\n",
            "job.yaml:4: roles.evaluator.min: a job needs every evaluator: only workers can have min; remove it\n"
            "    roles: {worker: {}, evaluator: {min: 1}}",
        ),
        (
            "elastic: {every: 5m}\n",
            "job.yaml:4: elastic: has no effect: no role has min or max, so every generation needs all hosts; "
            "write roles: {worker: {replicas: 4, min: 2}}\n    elastic: {every: 5m}",
        ),
        (
            "roles: {worker: {replicas: 2, min: 1}}\nsnapshots: {watch: ckpt}\n",
            "job.yaml:4: roles.worker.min: cannot be combined with snapshots.watch: a program's own checkpoints "
            "are captured on one host only; use Paceline's helpers for snapshots, or remove min\n"
            "    roles: {worker: {replicas: 2, min: 1}}",
        ),
        (
            "roles: {worker: {replicas: 2, min: 1}}\nelastic: {wait: 1h}\n",
            "job.yaml:5: elastic.wait: must be less than limits.start (1800 s), after which the run fails\n"
            "    elastic: {wait: 1h}",
        ),
        (
            "roles: {worker: {replicas: 2, min: 0}}\n",
            "job.yaml:4: roles.worker.min: must be at least 1, got 0; allowed: a whole number from 1 to 100000\n"
            "    roles: {worker: {replicas: 2, min: 0}}",
        ),
        (
            "roles: {worker: {replicas: 4, max: 3}}\n",
            "job.yaml:4: roles.worker.max: is 3, but the run starts with 4 hosts (replicas); allowed: at least 4\n"
            "    roles: {worker: {replicas: 4, max: 3}}",
        ),
        (
            "roles: {worker: {}, evaluator: {max: 2}}\n",
            "job.yaml:4: roles.evaluator.max: the number of hosts of evaluator cannot change: only workers can have "
            "max; remove it\n    roles: {worker: {}, evaluator: {max: 2}}",
        ),
        (
            "roles: {worker: [{replicas: 2, max: 3}, {replicas: 1, cpu: 2}]}\n",
            "job.yaml:4: roles.worker.0.max: cannot be used if workers are in several host pools: `scale` could "
            "not tell which pool to extend; remove it, or write one host pool\n"
            "    roles: {worker: [{replicas: 2, max: 3}, {replicas: 1, cpu: 2}]}",
        ),
        (
            "roles: {worker: {replicas: 2, max: 3}}\nsnapshots: {watch: ckpt}\n",
            "job.yaml:4: roles.worker.max: cannot be combined with snapshots.watch: a program's own checkpoints "
            "are captured on one host only; use Paceline's helpers for snapshots, or remove max\n"
            "    roles: {worker: {replicas: 2, max: 3}}",
        ),
        (
            "roles: {worker: {replicas: 2, max: many}}\n",
            'job.yaml:4: roles.worker.max: must be a whole number, got the string "many"; '
            "allowed: a whole number from 1 to 100000\n"
            "    roles: {worker: {replicas: 2, max: many}}",
        ),
    ],
)
def test_mistakes_in_elastic_jobs(folder: Path, fields: str, message: str) -> None:
    assert load_error(ELASTIC + fields, folder) == message


def test_a_parameter_server_job_needs_a_chief_to_be_elastic_and_never_grows(folder: Path) -> None:
    roles = "command: [python, train.py]\nroles: {worker: {replicas: 2, min: 1}, ps: {}}\n"
    assert load_error(SERVERS + roles, folder) == (
        "job.yaml:5: roles.worker.min: requires a chief in a parameter-server job: only a chief gives a lost worker's "
        "work to the others; add a chief, or remove it\n    roles: {worker: {replicas: 2, min: 1}, ps: {}}"
    )
    assert load_error(SERVERS + roles.replace("min: 1", "max: 3"), folder) == (
        "job.yaml:5: roles.worker.max: cannot be used in a parameter-server job: a chief cannot get more workers than "
        "the run starts with; remove it\n    roles: {worker: {replicas: 2, max: 3}, ps: {}}"
    )
    job.load_text(SERVERS + roles.replace("ps: {}", "ps: {}, chief: {}"), "job.yaml", folder)


SHARED = "name: a\ncommand: [python, train.py]\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            "framework: torch\nroles: {worker: [{share: 2}, {}]}\n",
            "job.yaml:4: roles.worker.0.share: cannot be used in a torch job: DDP and FSDP average the gradients of "
            "all tasks equally, so an example of a larger share would count less; remove it\n"
            "    roles: {worker: [{share: 2}, {}]}",
        ),
        (
            "framework: tensorflow\nstrategy: parameter-server\nroles: {worker: [{share: 2}, {}], ps: {}}\n",
            "job.yaml:5: roles.worker.0.share: has no effect in a tensorflow job with strategy parameter-server: a "
            "worker gets its next step when it has done the last one; remove it\n"
            "    roles: {worker: [{share: 2}, {}], ps: {}}",
        ),
        (
            "framework: none\nroles: {worker: {}, evaluator: {share: 3}}\n",
            "job.yaml:4: roles.evaluator.share: has no effect: evaluator does not train; remove it\n"
            "    roles: {worker: {}, evaluator: {share: 3}}",
        ),
        (
            "framework: jax\nroles: {worker: {replicas: 2, share: 2}}\n",
            "job.yaml:4: roles.worker.share: has no effect: all tasks that train have share 2; remove it, or write "
            "host pools with different shares\n    roles: {worker: {replicas: 2, share: 2}}",
        ),
        (
            "framework: none\nroles: {worker: [{share: 0}, {}]}\n",
            "job.yaml:4: roles.worker.0.share: must be at least 1, got 0; allowed: a whole number from 1 to 1000\n"
            "    roles: {worker: [{share: 0}, {}]}",
        ),
    ],
    ids=["torch", "parameter servers", "evaluator", "equal", "zero"],
)
def test_mistakes_in_shares(folder: Path, fields: str, message: str) -> None:
    assert load_error(SHARED + fields, folder) == message


def test_a_variable_that_env_of_sets_cannot_be_set(folder: Path) -> None:
    text = "name: a\nframework: jax\ncommand: [python, train.py]\nenv_of: [jaxjob]\nenv: {PROCESS_ID: '1'}\n"
    assert load_error(text, folder) == (
        "job.yaml:5: env.PROCESS_ID: is set by Paceline, because of env_of: [jaxjob]; remove one of them\n"
        "    env: {PROCESS_ID: '1'}"
    )


def test_a_program_beside_the_interpreter_is_found_without_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "env" / "bin" / "own-tool"
    tool.parent.mkdir(parents=True)
    for name in ("own-tool", "python"):
        (tool.parent / name).write_text("#!/bin/sh\n")
        (tool.parent / name).chmod(0o755)
    text = "name: a\nframework: torch\ncommand: [own-tool]\n"
    assert "was not found on PATH" in load_error(text, folder)
    monkeypatch.setenv("VIRTUAL_ENV", str(folder / "env"))
    assert job.load_text(text, "job.yaml", folder).job.command == ["own-tool"]


@pytest.mark.parametrize(
    "command",
    [
        "[torchrun, train.py]",
        "[python, -m, torch.distributed.run, train.py]",
        "[python, -um, torch.distributed.launch, train.py]",
        "[python3, -X, dev, -m, accelerate.commands.launch, train.py]",
    ],
)
def test_a_launcher_runs_once_per_host_with_a_note(folder: Path, command: str) -> None:
    text = f"name: a\nframework: torch\ngpus: 2\ncommand: {command}\n"
    loaded = job.load_text(text, "job.yaml", folder)
    assert len(planning.make_plan(loaded.job).tasks) == 1
    [note] = loaded.notes
    assert "is not needed: Paceline starts a task for each GPU" in note
