"""``python -m tests.cluster``: the cluster of this checkout from the command line."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence

from tests.cluster import apiserver, base_image, binaries
from tests.cluster.cluster import Cluster, obstacle
from tests.cluster.errors import ClusterError
from tests.cluster.images import TARGETS
from tests.cluster.paths import cache
from tests.cluster.progress import say
from tests.cluster.unavailable import explain


def build(_: argparse.Namespace) -> int:
    """build what this machine can run: the programs of a control plane, Helm, and those of a node with its base image"""
    control_plane = (*binaries.CONTROL_PLANE, binaries.HELM)
    if reason := binaries.obstacle(control_plane):
        return explain(reason)
    binaries.build(control_plane)
    if reason := obstacle():
        return explain(reason)
    binaries.build()
    base_image.build()
    say(f"a test cluster is in {cache()}")
    return 0


def up(_: argparse.Namespace) -> int:
    """start a cluster (an earlier one is removed)"""
    cluster = Cluster()
    cluster.start()
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    print(f"export PATH={binaries.search_path((binaries.KUBE, binaries.HELM, binaries.CONTAINERD))}:$PATH")
    print("# The cluster has a network of its own. A shell inside:")
    print(f"{shlex.join(cluster.nsenter)} $SHELL")
    print("# One command inside:")
    print("python -m tests.cluster exec -- kubectl get pods -A")
    return 0


def down(_: argparse.Namespace) -> int:
    """stop it; its logs stay"""
    Cluster().stop()
    return 0


def status(_: argparse.Namespace) -> int:
    """list its programs; code 1 if it does not run"""
    cluster = Cluster()
    for name, runs in cluster.status().items():
        print(f"{name:<25} {'running' if runs else 'ended':<8} {cluster.log(name)}")
    if not cluster.is_running():
        print("no cluster runs")
        return 1
    return 0


def images(args: argparse.Namespace) -> int:
    """build the project's images and load them"""
    cluster = Cluster()
    for target in TARGETS:
        print(cluster.build_image(target, f"perdure-{target}:{args.tag}"))
    return 0


def execute(args: argparse.Namespace) -> int:
    """run a command inside: its network, KUBECONFIG, PATH with kubectl, helm, ctr"""
    cluster = Cluster()
    argv = cluster.argv(args.command)
    os.execvpe(argv[0], argv, cluster.environment())


def serve(_: argparse.Namespace) -> int:
    """run an API server alone, on loopback, until Ctrl-C"""
    with apiserver.running() as server:
        print(f"export KUBECONFIG={server.kubeconfig}", flush=True)
        signal.pause()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = args.run
    # Being told to end is no reason to leave a cluster behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(args)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster", description="A real Kubernetes cluster on this machine, without Docker."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        added.set_defaults(run=run)
        return added

    command("build", build)
    command("up", up)
    command("down", down)
    command("status", status)
    command("images", images).add_argument("--tag", default="test", help="of both images (default: test)")
    command("exec", execute).add_argument("command", nargs="+", metavar="CMD")
    command("apiserver", serve)
    return parser


if __name__ == "__main__":
    sys.exit(main())
