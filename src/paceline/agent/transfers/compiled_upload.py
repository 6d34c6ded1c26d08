"""Maintains the folder of what the tasks of a host compile, in the background: limits its size, syncs it to disk, and
on a cluster stores a copy with the run's snapshots, for a pod that replaces this one.
"""

from __future__ import annotations

import os

from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter_client import PorterClient
from paceline.plan import Plan

SOON, SELDOM = 10.0, 600.0  # seconds between requests: tasks compile mostly at their start


class CompiledUpload:
    def __init__(self, plan: Plan, options: Options, folder: str, porter: PorterClient, loop: Loop) -> None:
        """`folder`: contains what tasks compile; empty: nothing is kept."""
        self._porter, self._loop = porter, loop
        if not folder or not os.path.isdir(folder):
            return
        # A pod's folder is deleted with the pod.
        outlives = options.echo and (plan.snapshots.in_bucket or plan.snapshots.claimed[0])
        scratch = f"{options.folder}/.{options.host}.compiled"
        self._request = req.KeepCompiled(options.compiled, folder, options.host if outlives else "", scratch)
        if outlives:
            # Tasks do not wait for it: files that arrive in time need not be compiled.
            porter.ask(req.FetchCompiled(folder, options.host, scratch), self._fetched)
        else:
            loop.after(SOON, lambda: self._keep(SOON))

    def _fetched(self, _: req.Answer) -> None:
        """From now on, the copy in the store may be replaced: it contains nothing that this host lacks."""
        self._loop.after(SOON, lambda: self._keep(SOON))

    def _keep(self, pause: float) -> None:
        following = min(SELDOM, 3 * pause)

        def answered(_: req.Answer) -> None:
            """A failure is not reported: the next request follows, and without the copy a later start compiles."""
            self._loop.after(following, lambda: self._keep(following))

        self._porter.ask(self._request, answered)
