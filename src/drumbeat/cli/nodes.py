"""drumbeat nodes: what past runs say about each node, and which nodes new jobs avoid."""

from __future__ import annotations

import os
from typing import Any

from drumbeat.base.problem import Problem
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json

_DEFAULT = "7d"


def add_arguments(parser: Any) -> None:
    action = parser.add_argument(
        "words",
        nargs="*",
        metavar="HOST",
        help="a node or node list such as nid[001-004]: show its record (default: all). exclude HOST: new jobs avoid it. "
        "forget HOST: new jobs use it again, and its record is dropped",
    )
    action.offers = ("exclude", "forget")
    parser.usage = "%(prog)s [exclude | forget] [HOST ...] [options]"
    parser.add_argument("--for", dest="how_long", metavar="TIME", help=f"exclude: for how long (default: {_DEFAULT})")
    parser.add_argument("--why", metavar="TEXT", default="", help="exclude: the reason, shown by submit")
    parser.add_argument("--site", metavar="S", help="the cluster (default: the one this machine belongs to)")
    add_json(parser)


def run(args: Any) -> int:
    from drumbeat.desk import nodes

    action = args.words[0] if args.words and args.words[0] in ("exclude", "forget") else ""
    hosts = nodes.host_names(args.words[1:] if action else args.words)
    if action and not hosts:
        raise Problem(f"{action} which node?", f"drumbeat nodes {action} HOST")
    if action != "exclude" and (args.how_long or args.why):
        raise Problem("--for and --why belong to: drumbeat nodes exclude HOST")
    site = nodes.site_here(args.site, os.environ)
    changed: Any
    if not action:
        changed = nodes.table(site, hosts, os.environ)
    elif action == "exclude":
        changed = nodes.exclude(site, hosts, args.how_long or _DEFAULT, args.why, os.environ)
    else:
        changed = nodes.forget(site, hosts, os.environ)
    if args.json:
        print_json(changed.plain(), None)
    else:
        print("\n".join(changed.lines()))
    return 0
