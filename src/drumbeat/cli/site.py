"""drumbeat site: the clusters drumbeat knows, and a profile of your own."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, List, Optional, Sequence

from drumbeat import backends
from drumbeat.base.order import HostPath
from drumbeat.base.problem import Problem
from drumbeat.base.record import to_plain
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json
from drumbeat.containers import RUNTIMES
from drumbeat.containers.image import recipe
from drumbeat.desk.nodes import site_here
from drumbeat.desk.start.site_check import check_site
from drumbeat.jobfile.check import raise_all
from drumbeat.jobfile.site import (
    SeveralSites,
    built_in_text,
    claimed_too,
    find_paths,
    find_site,
    load_site,
    new_site,
    site_from_path,
    site_lines,
    site_names,
    user_profiles,
)
from drumbeat.jobfile.yamlfile import read_file
from drumbeat.machine.gather import gather
from drumbeat.machine.replay import open_host


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "action",
        choices=("list", "show", "new", "check", "image"),
        help="list: all sites; the one detected for this machine is marked. show NAME: one site with the reason for each "
        "value. new: print a profile made from this machine's facts. check SITE: whether a profile is valid, and its paths "
        "exist. image NAME: a recipe for an image with the RDMA libraries it needs.",
    )
    parser.add_argument("site", nargs="?", metavar="SITE", help="a name of the list, or a profile's path")
    parser.add_argument("--root", metavar="DIR", help="new, check: another machine, as a folder or a capture")
    parser.add_argument("--source", action="store_true", help="show: print the profile itself, to copy it")
    parser.add_argument("--base", metavar="IMAGE", help="image: the image to build on")
    parser.add_argument("--library", metavar="FILE", help="image: libbnxt_re-A.B.C.D.tar.gz, the hosts' version")
    add_json(parser)


def run(args: Any) -> int:
    if args.action in ("show", "check", "image") and not args.site:
        words = {"show": "NAME", "check": "SITE", "image": "NAME --base IMAGE"}[args.action]
        raise Problem(f"site {args.action} needs a {words.split()[0].lower()}", f"drumbeat site {args.action} {words}")
    actions = {"list": _list, "show": _show, "new": _new, "check": _check, "image": _image}
    return int(actions[args.action](args))


def _image(args: Any) -> int:
    if not args.base:
        raise Problem("an image is built on another one", "add --base docker.io/rocm/pytorch-training")
    site = find_site(args.site, os.environ, "")
    runtime = site.container.runtime if site.container else ""
    text = recipe(site.name, [path.pattern for path in site.paths.values()], runtime, args.base, args.library)
    if args.json:
        print_json({"dockerfile": text}, None)
    else:
        print(text, end="")
    return 0


def _list(args: Any) -> int:
    several = ""
    try:
        here: Sequence[str] = [site_here(None, os.environ).name]
    except SeveralSites as problem:
        here, several = problem.names, f"; {problem.what}: each command needs --site"
    own = user_profiles(os.environ)
    rows = [(name, load_site(name, os.environ).summary) for name in site_names(os.environ)]
    if args.json:
        listed = [{"name": name, "summary": words, "file": own.get(name), "here": name in here} for name, words in rows]
        print_json(listed)
        return 0
    width = max(len(name) for name, _ in rows)
    for name, summary in rows:
        print(f"{'*' if name in here else ' '} {name:<{width}}  {summary}{'  (yours)' if name in own else ''}")
    print(f"* detected for this machine{several}")
    return 0


def _show(args: Any) -> int:
    path = _own_file(args.site)
    site = site_from_path(path, "site show") if path else load_site(args.site, os.environ, "site show")
    if args.source:
        print(read_file(path, "a site profile") if path else built_in_text(args.site), end="")
    elif args.json:
        plain = to_plain(site)
        plain.pop("origins")
        print_json(plain)
    else:
        print("\n".join(site_lines(site)))
    return 0


def _own_file(site: str) -> Optional[str]:
    """Return the file of a user's profile that is named by its path, or as the list shows it."""
    named = os.sep in site or site.endswith((".yaml", ".yml"))
    return site if named else user_profiles(os.environ).get(site)


def _new(args: Any) -> int:
    facts = gather(open_host(args.root))
    batch = facts.identity.batch if facts.identity.batch in backends.names() else ""
    login = None if batch or args.root else backends.at_login(os.environ)
    asked = [] if batch or args.root else [login] if login else backends.with_login_nodes()
    pools: List[Any] = []
    for backend in asked:
        try:
            pools = backend.pools(os.environ)
        except Problem as failed:
            name = login.name if login else "local"
            print(
                f"drumbeat site: {failed}\n  so this profile describes this machine (backend: {name}), not {backend.title}'s "
                "nodes",
                file=sys.stderr,
            )
        if pools:
            login = backend
            break
    cluster = login.cluster(os.environ) if login else None
    runtime = (
        "" if args.root else next((name for name, one in RUNTIMES.items() if one.lines and shutil.which(name)), "")
    )
    print(new_site(facts, login.name if login else batch or "local", pools, cluster or "", runtime), end="")
    return 0


def _check(args: Any) -> int:
    """Check a profile. 0: valid. 1: valid, but a path is missing on this machine. Mistakes in the file are a Problem (2)."""
    path = _own_file(args.site) or args.site
    checked = check_site(path, os.environ)
    raise_all(path, checked.mistakes)
    site = checked.site
    if site is None:
        raise Problem(f"{args.site}: nothing in it could be checked")
    for name in checked.assumed:
        print(f"drumbeat site: ${name} is not set here; the environment of each user must have it", file=sys.stderr)
    others = claimed_too(site, os.environ)
    if others:
        print(f"drumbeat site: also claimed by {'; '.join(others)}: there, each command needs --site", file=sys.stderr)
    host = open_host(args.root)
    wanted = [HostPath(name, path.pattern, path.why) for name, path in site.paths.items()]
    found, missing = find_paths(wanted, host.list, host.hostname())
    if args.json:
        print_json({"site": site.name, "paths": {each.name: found.get(each.name) for each in wanted}})
    else:
        for each in wanted:
            print(f"{each.name}: {found.get(each.name) or 'nothing here matches ' + each.pattern}")
        runs = site.runs or ""
        top = f"/{runs.split('/')[1]}" if runs.startswith("/") else ""
        if top and not host.list(top) and not top.startswith("/$"):
            print(f"runs: {top} is not on this machine, or is empty; run folders go there")
        note = f", but {len(missing)} of its {len(wanted)} paths are not on this machine" if missing else ""
        print(f"{args.site}: valid{note}")
    return 1 if missing else 0
