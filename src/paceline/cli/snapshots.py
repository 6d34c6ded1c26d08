"""`paceline snapshots`: those of one run, read at their place, also while it trains."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import ContextOption, NamespaceOption, OnOption
from paceline.cli.reading import RUN_HELP, SNAPSHOT_HELP, Where, ended_like_ctrl_c, meant, opened, progress
from paceline.cli.say import confirm, fail, one_of, print_json, tell

if TYPE_CHECKING:
    from paceline.storage.snapshots import Known
    from paceline.view.places import Source
    from paceline.view.snapshots import Found

VERBS = {
    "ls": "List those that count, newest first.",
    "show": "Show all that is known of one.",
    "get": "Copy one to a folder, verified.",
    "verify": "Read every byte, and name what is damaged.",
    "rm": "Delete some.",
}

One = Annotated[str | None, typer.Argument(metavar="SNAPSHOT", help=SNAPSHOT_HELP, show_default=False)]
Some = Annotated[list[str] | None, typer.Argument(metavar="SNAPSHOT", help=SNAPSHOT_HELP, show_default=False)]


def main(context: typer.Context) -> int:
    """Look at a run's snapshots, copy, check or delete them.

    \b
    paceline snapshots ls                         those of the newest run that count, newest first
    paceline snapshots show digits-3f9a 120       all that is known of one
    paceline snapshots get s3://bucket/path/digits-3f9a --to best

    The place itself is asked: it works while the run trains, after it was deleted, and for runs of other machines.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
    return 0


def ls(
    run: Where = None,
    also_dead: Annotated[
        bool, typer.Option("--all", help="Also those that count no more: a later generation began from an older one.")
    ] = False,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="json|yaml|wide|name", help="The form.",
            autocompletion=lambda: ["json", "yaml", "wide", "name"],
        ),
    ] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:  # fmt: skip
    """List the snapshots of a run that count, newest first."""
    one_of(output, ("json", "yaml", "wide", "name"))
    from paceline.view import snapshots

    with opened(run, on, context, namespace) as source:
        known = source.reader.known()
        ids = snapshots.every(known) if also_dead else known.counted()
        if output == "name":
            for id in ids:
                print(id)
            return 0
        found = snapshots.look_up(source.reader, known, ids)
        if output in ("json", "yaml"):
            _print([snapshots.data(each) for each in found], output)
        elif not found:
            tell(snapshots.none_yet(source, known))
        else:
            _show_table(found, also_dead, output == "wide")
        return 0


def show(
    run: Where = None,
    snapshot: One = None,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="json|yaml", help="The form.", autocompletion=lambda: ["json", "yaml"]
        ),
    ] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:  # fmt: skip
    """Show all that is known of a snapshot: its files with their digests, and the generations it stands on."""
    one_of(output, ("json", "yaml"))
    from paceline.view import snapshots

    with opened(run, on, context, namespace) as source:
        known = source.reader.known()
        id = meant(source, known, snapshot)
        made = source.reader.manifest(id)
        found = snapshots.Found(id, id in known.counted(), made, evaluation=source.reader.evaluation(id))
        if not output:
            print("\n".join(_text(source, known, found)))
            sys.stdout.flush()
            return 0
        chain = [
            {"generation": link.generation, "from": str(link.parent) if link.parent else None}
            for link in snapshots.links(known, id)
        ]
        told = {"run": source.run, "place": f"{source.where}/{id}", **snapshots.data(found)}
        _print({**told, "chain": chain, "parts": snapshots.parts(made)}, output)
        return 0


def get(
    run: Where = None,
    snapshot: One = None,
    to: Annotated[str, typer.Option("--to", metavar="FOLDER", help="A folder that is new, or empty.")] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Copy a snapshot to a new folder, which is there only once every file was verified."""
    if not to:
        fail("say where to: --to FOLDER")
    from pathlib import Path

    from paceline.view import snapshots
    from paceline.view.words import count, size

    with opened(run, on, context, namespace) as source:
        made = source.reader.manifest(meant(source, source.reader.known(), snapshot))
        folder = Path(to).expanduser().absolute()
        whole = made.files().values()
        amount = sum(file.size for _, file in whole)
        with ended_like_ctrl_c(), progress(str(made.id), amount) as still:
            snapshots.copy(source.transfers, made, folder, still)
        tell(f"{made.id} of {source.run} is in {folder}: {count(len(whole), 'file')}, {size(amount)}")
        return 0


def verify(
    run: Where = None,
    snapshot: Some = None,
    every: Annotated[bool, typer.Option("--all", help="All there are.")] = False,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Read every byte of snapshots at their place. Exit code 1 where something is not what was committed."""
    if snapshot and every:
        fail("name snapshots or say --all, not both")
    from paceline.storage.manifest import Damaged, Gone, Newer
    from paceline.view import snapshots

    with opened(run, on, context, namespace) as source:
        known = source.reader.known()
        named = [snapshots.find(source, known, each) for each in snapshot or []]
        chosen = snapshots.every(known) if every else named or [snapshots.newest(source, known)]
        if not chosen:
            tell(snapshots.none_yet(source, known))
        damaged = False
        for id in dict.fromkeys(chosen):
            try:
                made = source.reader.manifest(id)
                with progress(str(id), made.size) as still:
                    wrong = snapshots.damages(source.transfers, made, still)
                words = _amount(snapshots.Found(id, True, made))
            except Gone:
                tell(f"{id} was deleted meanwhile")
                continue
            except (Damaged, Newer) as error:
                wrong = [str(error)]
            for line in wrong:
                print(f"{id}: {line}", flush=True)
            if not wrong:
                print(f"{id} is as it was committed: {words}", flush=True)
            damaged = damaged or bool(wrong)
        return 1 if damaged else 0


def rm(
    run: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP.replace(", the newest if left out", ""))],
    snapshot: Annotated[list[str], typer.Argument(metavar="SNAPSHOT", help="As `paceline snapshots ls` names them.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted; delete nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also the newest of a run that may still train.")] = False,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Delete snapshots at their place. The newest of a run that trains is not deleted: it would go on from it."""
    from paceline.view import snapshots
    from paceline.view.words import join, size

    with opened(run, on, context, namespace) as source:
        known = source.reader.known()
        chosen = list(dict.fromkeys(snapshots.find(source, known, each) for each in snapshot))
        if (newest := known.counted()[:1]) and newest[0] in chosen:
            if source.alive:
                fail(f"{newest[0]} is the newest of {source.run}, which still runs: it would go on from there", 1)
            if not force and (doubt := source.doubt()):
                fail(f"{doubt}, and would go on from {newest[0]}; --force deletes it all the same", 1)
        found = snapshots.look_up(source.reader, known, chosen)
        what = f"{join([str(each.id) for each in found])} of {source.run} ({size(snapshots.sizes(found))})"
        if dry_run:
            tell(f"would delete {what} at {source.where}")
            return 0
        if not yes:
            confirm(f"delete {what} at {source.where}?", f"say --yes to delete {what}")
        for each in found:
            source.reader.delete(each.id)
            tell(f"deleted {each.id}")
        return 0


# ---- in words


def _print(data: Any, output: str) -> None:
    if output == "json":
        print_json(data)
    else:
        from paceline.view.yaml import dump

        print(dump(data), end="", flush=True)


def _show_table(found: list[Found], also_dead: bool, wide: bool) -> None:
    from paceline.view.terminal import clean, table
    from paceline.view.words import metrics

    heads = ["SNAPSHOT", "STEP", "GENERATION", "AGE", "SIZE", "FILES"]
    rows = [[*heads, *(["COUNTS"] if also_dead else []), *(["COMMITTED", "TASKS"] if wide else []), "METRICS"]]
    for each in found:
        made = each.manifest
        cells = [str(each.id), str(each.id.step), str(each.id.generation), *_cells(each)]
        cells += ["yes" if each.counts else "no"] if also_dead else []
        cells += [made.at if made else "-", str(len(made.parts)) if made else "-"] if wide else []
        rows.append([*cells, f"damaged: {each.damaged}" if made is None else metrics(each.metrics)])
    print(table([[clean(cell, colours=False) for cell in row] for row in rows]))
    sys.stdout.flush()


def _cells(found: Found) -> list[str]:
    from paceline.view import snapshots
    from paceline.view.words import since, size, span

    made = found.manifest
    if made is None:
        return ["-", "-", "-"]
    age = since(made.at, time.time())
    return [span(round(age)) if age is not None else "-", size(made.size), str(snapshots.files(made))]


def _amount(found: Found) -> str:
    from paceline.view import snapshots
    from paceline.view.words import count, size

    assert found.manifest is not None
    return f"{count(snapshots.files(found.manifest), 'file')}, {size(found.manifest.size)}"


def _text(source: Source, known: Known, found: Found) -> list[str]:
    from paceline.view import snapshots
    from paceline.view.terminal import clean, table
    from paceline.view.words import count, join, metrics, since, size, span

    made, id, by = found.manifest, found.id, found.evaluation
    assert made is not None
    age = since(made.at, time.time())
    when = f", committed {span(round(age))} ago ({made.at})" if age is not None else ""
    began = [f"generation {link.generation} from {link.parent or 'nothing'}" for link in snapshots.links(known, id)]
    told = {
        "place": f"{source.where}/{id}",
        "counts": _counts(known, found),
        "chain": ", ".join(began),
        "copy of": made.origin,
        "size": _amount(found),
        "written by": f"{join([part.task for part in made.parts])}; {count(made.world, 'task')} trained together"
        if made.world
        else "",
        "metrics": metrics(dict(made.metrics), most=100),
        "evaluated": f"{metrics(dict(by.metrics), most=100) or 'nothing reported'} ({by.task})" if by else "",
        "versions": ", ".join(f"{name} {version}" for name, version in made.versions.items()),
    }
    rows = [["TASK", "FILE", "SIZE", "SHA256"]]
    rows += [[each["task"], each["path"], size(each["size"]), each["sha256"]] for each in snapshots.parts(made)]
    lines = [f"{id} of {source.run}{when}", *(f"  {name:<12} {words}" for name, words in told.items() if words)]
    return [*(clean(line, colours=False) for line in lines), "", *table(rows).splitlines()]


def _counts(known: Known, found: Found) -> str:
    if found.counts:
        return "yes, the newest" if known.counted()[0] == found.id else "yes"
    from paceline.view import snapshots

    later = snapshots.superseded_by(known, found.id)
    return f"no: generation {later.generation} began from {later.parent or 'nothing'}" if later else "no"
