"""`paceline serve --on kubernetes`: serves a run's model from pods on a cluster, until `--stop`."""

from __future__ import annotations

from paceline.cli.output import fail, note, tell
from paceline.errors import Call
from paceline.view.text.option_names import suggested


def serve_on_kubernetes(
    run: str | None,
    snapshot: str | None,
    name: str,
    job: str,
    code: str,
    context: str | None,
    namespace: str | None,
    endpoint: str,
) -> int:
    from paceline.backends.kubernetes.serving.deployment import NotServed
    from paceline.client.models.kubernetes_serving import prepare_serving
    from paceline.view.text.wording import count

    serving = prepare_serving(run, snapshot, name, job, code, context, namespace, note, endpoint)
    previous = serving.apply()
    replicas, image = serving.plan.serve["replicas"], serving.plan.serve["image"]
    tell(f"starting {count(replicas, 'pod')} ({image}) to serve {serving.snapshot} of {serving.run}")
    stop = suggested(Call("serve", serving.run, serving.stop_arguments))
    try:
        serving.wait(lambda why: tell(f"waiting: {why}"))
    except NotServed as error:
        for line in error.lines:
            tell(line)
        still_served = "; the previous model is still served" if previous.served else ""
        fail(f"{serving.snapshot} is not served: {error}{still_served}", 1, remedy=f"`{stop}` removes it")
    except KeyboardInterrupt:
        tell(f"the pods continue to start; `{stop}` removes them")
        raise
    serving.prune(previous)
    inside, outside = serving.addresses()
    print(inside, flush=True)
    tell(f"{serving.snapshot} is served inside the cluster" + (f", and {outside}" if outside else ""))
    if outside:
        note("the server has no authentication")
    return 0


def stop_on_kubernetes(run: str | None, context: str | None, namespace: str | None) -> int:
    from paceline.client.models.kubernetes_serving import stop_serving

    name, served_in = stop_serving(run, context, namespace)
    tell(f"stopped serving {name} in namespace {served_in}")
    return 0
