"""`paceline snapshots`: reads the snapshots of one run where they are stored, even while it trains."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import ContextOption, EndpointOption, NamespaceOption, OnOption
from paceline.cli.output import confirm, expanded, fail, one_of, print_json, tell, text_of
from paceline.cli.snapshot_options import (
    LOCATION_HELP,
    SNAPSHOT_HELP,
    RunOrLocation,
    interrupt_on_signals,
    opened,
    progress,
)

if TYPE_CHECKING:
    from paceline.storage.snapshots.manifest import Manifest
    from paceline.storage.snapshots.repository import Inventory
    from paceline.view.snapshots.snapshot_listing import SnapshotInfo
    from paceline.view.snapshots.snapshot_locations import Source

VERBS = {
    "ls": "List snapshots, newest first.",
    "show": "Show the details of a snapshot.",
    "get": "Copy a snapshot to a folder and verify it.",
    "verify": "Read every byte of snapshots and report damage.",
    "rm": "Delete snapshots.",
}

OneSnapshot = Annotated[str | None, typer.Argument(metavar="SNAPSHOT", help=SNAPSHOT_HELP, show_default=False)]
Snapshots = Annotated[list[str] | None, typer.Argument(metavar="SNAPSHOT", help=SNAPSHOT_HELP, show_default=False)]


def main(context: typer.Context) -> int:
    """List, show, copy, verify or delete a run's snapshots.

    \b
    Examples:
      paceline snapshots ls                      List the snapshots of the newest run
      paceline snapshots show digits-3f9a 120    Show the details of the snapshot at step 120
      paceline snapshots get s3://bucket/path/digits-3f9a best --to best-model

    Snapshots are read where they are stored. This works while the run trains, after it was deleted, and for runs
    started on other machines.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
    return 0


def ls(
    run: RunOrLocation = None,
    include_superseded: Annotated[
        bool,
        typer.Option("--all", help="Include snapshots superseded when a later generation started from an older one."),
    ] = False,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="json|yaml|wide|name", help="Output format.",
            autocompletion=lambda: ["json", "yaml", "wide", "name"],
        ),
    ] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:  # fmt: skip
    """List the current snapshots of a run, newest first."""
    one_of(output, ("json", "yaml", "wide", "name"))
    from paceline.client.snapshots.run_snapshots import json_form
    from paceline.view.snapshots import snapshot_listing

    with opened(run, on, context, namespace, endpoint) as source:
        inventory = source.reader.inventory()
        ids = snapshot_listing.all_committed(inventory) if include_superseded else inventory.current()
        if output == "name":
            for id in ids:
                print(id)
            return 0
        infos = snapshot_listing.look_up(source.reader, inventory, ids)
        if output in ("json", "yaml"):
            _print([json_form(each) for each in infos], output)
        elif not infos:
            tell(text_of(snapshot_listing.none_yet(source, inventory)))
        else:
            _show_table(infos, include_superseded, output == "wide")
        return 0


def show(
    run: RunOrLocation = None,
    snapshot: OneSnapshot = None,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="json|yaml", help="Output format.", autocompletion=lambda: ["json", "yaml"]
        ),
    ] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:  # fmt: skip
    """Show the details of a snapshot: its files with their digests, and the generations it is based on."""
    one_of(output, ("json", "yaml"))
    from paceline.client.json_form import versioned
    from paceline.client.snapshots.snapshot_lookup import find_snapshot
    from paceline.view.snapshots import snapshot_listing

    with opened(run, on, context, namespace, endpoint) as source:
        inventory = source.reader.inventory()
        id = find_snapshot(source, inventory, snapshot)
        manifest = source.reader.manifest(id)
        evaluation = source.reader.evaluation(id)
        info = snapshot_listing.SnapshotInfo(id, id in inventory.current(), manifest, evaluation=evaluation)
        if not output:
            print("\n".join(_details(source, inventory, info)))
            sys.stdout.flush()
            return 0
        chain = [
            {"generation": link.generation, "from": str(link.parent) if link.parent else None}
            for link in snapshot_listing.links(inventory, id)
        ]
        data = {"run": source.run, "place": f"{source.address}/{id}", **snapshot_listing.data(info)}
        _print(versioned({**data, "chain": chain, "parts": snapshot_listing.parts(manifest)}), output)
        return 0


def get(
    run: RunOrLocation = None,
    snapshot: OneSnapshot = None,
    to: Annotated[
        str, typer.Option("--to", metavar="DIR", help="Folder to copy to; must be new or empty. Required.")
    ] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:
    """Copy a snapshot to a folder, which appears only when every file is verified."""
    if not to:
        fail("--to DIR is required")

    from paceline.client.snapshots.snapshot_lookup import find_snapshot
    from paceline.view.snapshots import snapshot_listing
    from paceline.view.text.wording import count, size

    with opened(run, on, context, namespace, endpoint) as source:
        manifest = source.reader.manifest(find_snapshot(source, source.reader.inventory(), snapshot))
        folder = expanded(to)
        files = manifest.files().values()
        total = sum(file.size for _, file in files)
        with interrupt_on_signals(), progress(str(manifest.id), total) as advance:
            snapshot_listing.copy(source.transfers, manifest, folder, advance)
        tell(f"copied {manifest.id} of {source.run} to {folder}: {count(len(files), 'file')}, {size(total)}")
        return 0


def verify(
    run: RunOrLocation = None,
    snapshot: Snapshots = None,
    every: Annotated[bool, typer.Option("--all", help="Verify all snapshots, including superseded ones.")] = False,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:
    """Read every byte of snapshots and compare it with what was committed (default: the newest snapshot).

    Exit code: 1 if anything differs, otherwise 0.
    """
    if snapshot and every:
        fail("name snapshots or use --all, not both")
    from paceline.storage.snapshots.manifest import Damaged, Gone, Newer
    from paceline.view.snapshots import snapshot_listing

    with opened(run, on, context, namespace, endpoint) as source:
        inventory = source.reader.inventory()
        named = [snapshot_listing.find(source, inventory, each) for each in snapshot or []]
        chosen = (
            snapshot_listing.all_committed(inventory)
            if every
            else named or [snapshot_listing.newest(source, inventory)]
        )
        if not chosen:
            tell(text_of(snapshot_listing.none_yet(source, inventory)))
        damaged = False
        for id in dict.fromkeys(chosen):
            try:
                manifest = source.reader.manifest(id)
                with progress(str(id), manifest.size) as advance:
                    problems = snapshot_listing.damages(source.transfers, manifest, advance)
                amount = _amount(manifest)
            except Gone:
                tell(f"{id} was deleted in the meantime")
                continue
            except (Damaged, Newer) as error:
                problems = [text_of(error)]
            for problem in problems:
                print(f"{id}: {problem}", flush=True)
            if not problems:
                print(f"{id} is intact: {amount}", flush=True)
            damaged = damaged or bool(problems)
        return 1 if damaged else 0


def rm(
    run: Annotated[str, typer.Argument(metavar="RUN", help=f"Run id or a unique prefix of it, {LOCATION_HELP}")],
    snapshot: Annotated[
        list[str], typer.Argument(metavar="SNAPSHOT", help="Snapshots, as `paceline snapshots ls` lists them.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Delete the newest snapshot even if this machine does not know whether the run has ended."
        ),
    ] = False,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:
    """Delete snapshots.

    The newest snapshot of a run that this machine knows to be running is never deleted, not even with --force: a
    restart would resume from it.
    """
    from paceline.view.snapshots import snapshot_listing
    from paceline.view.text.wording import join, size

    with opened(run, on, context, namespace, endpoint) as source:
        inventory = source.reader.inventory()
        chosen = list(dict.fromkeys(snapshot_listing.find(source, inventory, each) for each in snapshot))
        if (newest := inventory.current()[:1]) and newest[0] in chosen:
            if source.alive:
                fail(
                    f"{newest[0]} is the newest snapshot of {source.run}, which is running and would resume from it", 1
                )
            if not force and (doubt := source.doubt()):
                fail(f"{doubt}, and would resume from {newest[0]}", 1, remedy="--force deletes it anyway")
        infos = snapshot_listing.look_up(source.reader, inventory, chosen)
        names = f"{join([str(each.id) for each in infos])} of {source.run} ({size(snapshot_listing.sizes(infos))})"
        if dry_run:
            tell(f"would delete {names} at {source.address}")
            return 0
        if not yes:
            confirm(f"delete {names} at {source.address}?", f"use --yes to delete {names}")
        for each in infos:
            source.reader.delete(each.id)
            tell(f"deleted {each.id}")
        return 0


# ---- output


def _print(data: Any, output: str) -> None:
    if output == "json":
        print_json(data)
    else:
        from paceline.view.text.yaml_output import dump

        print(dump(data), end="", flush=True)


def _show_table(infos: list[SnapshotInfo], include_superseded: bool, wide: bool) -> None:
    from paceline.view.text.terminal import table
    from paceline.view.text.wording import metrics

    headings = ["SNAPSHOT", "STEP", "GENERATION", "AGE", "SIZE", "FILES"]
    rows = [
        [*headings, *(["CURRENT"] if include_superseded else []), *(["COMMITTED", "TASKS"] if wide else []), "METRICS"]
    ]
    for each in infos:
        manifest = each.manifest
        cells = [str(each.id), str(each.id.step), str(each.id.generation), *_cells(manifest)]
        cells += ["yes" if each.is_current else "no"] if include_superseded else []
        cells += [manifest.at if manifest else "-", str(len(manifest.parts)) if manifest else "-"] if wide else []
        rows.append([*cells, f"damaged: {each.damaged}" if manifest is None else metrics(each.metrics)])
    print(table(rows))
    sys.stdout.flush()


def _cells(manifest: Manifest | None) -> list[str]:
    from paceline.view.snapshots import snapshot_listing
    from paceline.view.text.wording import since, size, span

    if manifest is None:
        return ["-", "-", "-"]
    age = since(manifest.at, time.time())
    return [span(round(age)) if age is not None else "-", size(manifest.size), str(snapshot_listing.files(manifest))]


def _amount(manifest: Manifest) -> str:
    from paceline.view.snapshots import snapshot_listing
    from paceline.view.text.wording import count, size

    return f"{count(snapshot_listing.files(manifest), 'file')}, {size(manifest.size)}"


def _details(source: Source, inventory: Inventory, info: SnapshotInfo) -> list[str]:
    from paceline.view.snapshots import snapshot_listing
    from paceline.view.text.terminal import clean, table
    from paceline.view.text.wording import count, join, metrics, since, size, span

    manifest, id, evaluation = info.manifest, info.id, info.evaluation
    assert manifest is not None
    age = since(manifest.at, time.time())
    committed = f", committed {span(round(age))} ago ({manifest.at})" if age is not None else ""
    history = [
        f"generation {link.generation} (started from {link.parent or 'scratch'})"
        for link in snapshot_listing.links(inventory, id)
    ]
    evaluated = ""
    if evaluation:
        evaluated = f"{metrics(dict(evaluation.metrics), most=100) or 'no metrics reported'} ({evaluation.task})"
    writers = f"{join([part.task for part in manifest.parts])} (in a group of {count(manifest.world, 'task')})"
    fields = {
        "location": f"{source.address}/{id}",
        "current": _currency(inventory, info),
        "history": ", ".join(history),
        "copy of": manifest.origin,
        "size": _amount(manifest),
        "written by": writers if manifest.world else "",
        "metrics": metrics(dict(manifest.metrics), most=100),
        "evaluated": evaluated,
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    rows = [["TASK", "FILE", "SIZE", "SHA256"]]
    rows += [
        [each["task"], each["path"], size(each["size"]), each["sha256"]] for each in snapshot_listing.parts(manifest)
    ]
    lines = [f"{id} of {source.run}{committed}", *(f"  {name:<12} {text}" for name, text in fields.items() if text)]
    return [*(clean(line, colors=False) for line in lines), "", *table(rows).splitlines()]


def _currency(inventory: Inventory, info: SnapshotInfo) -> str:
    """Whether the snapshot is on the run's current chain, and if not, which generation superseded it."""
    if info.is_current:
        return "yes, the newest" if inventory.current()[0] == info.id else "yes"
    from paceline.view.snapshots import snapshot_listing

    later = snapshot_listing.superseded_by(inventory, info.id)
    if later is None:
        return "no"
    return f"no: superseded by generation {later.generation}, which started from {later.parent or 'scratch'}"
