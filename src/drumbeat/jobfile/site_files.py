"""Finds a site's profile: the user's own wins over the built-in one of the same name; a cluster is data."""

from __future__ import annotations

import fnmatch
import os
import pkgutil
import re
from typing import Dict, Iterable, List, Mapping, Optional

from drumbeat.base.home import users_folder
from drumbeat.base.problem import Problem
from drumbeat.jobfile.check import near
from drumbeat.jobfile.site import Detect, Site, site_from_text
from drumbeat.jobfile.yamlfile import read_file, shown, shown_path

DEFAULT = "localhost"


def find_site(
    wanted: Optional[str],
    environ: Mapping[str, str],
    hostname: str,
    cluster: Optional[str] = None,
    place: str = "--site",
) -> Site:
    """The site that was asked for (a name, or the path of a profile), else the one detected, else localhost.

    `place` says who asked, in a message about an unknown name: `job.where("site")`.
    """
    if wanted is None:
        return detect(environ, hostname, cluster)
    if os.sep in wanted or wanted.endswith((".yaml", ".yml")):
        return site_from_path(wanted, place)
    return load_site(wanted, environ, place)


def load_site(name: str, environ: Mapping[str, str], place: str = "--site") -> Site:
    own = user_profiles(environ)
    if name in own:
        return site_from_path(own[name])
    if name in built_in():
        return site_from_text(_built_in_text(name), name, f"sites/{name}.yaml")
    known = site_names(environ)
    raise Problem(
        f"{place}: no site {shown(name)}{near(name, known)}",
        f"known sites: {', '.join(known)}; your own goes to {user_folder(environ)}/NAME.yaml, or give its path",
    )


def site_from_path(path: str, place: str = "--site") -> Site:
    if not os.path.exists(path):
        raise Problem(f"{place}: no profile {shown_path(path)}")
    name = os.path.splitext(os.path.basename(path))[0]
    return site_from_text(read_file(path, "a site profile"), name, shown_path(path))


def site_names(environ: Mapping[str, str]) -> List[str]:
    return sorted({*built_in(), *user_profiles(environ)})


def detect(environ: Mapping[str, str], hostname: str, cluster: Optional[str]) -> Site:
    """By the cluster's name, then by the host's, then by variables. Two sites that claim one are a Problem, not a guess."""
    own = user_profiles(environ)
    signs = {name: detect_of(name) for name in built_in() if name not in own}
    signs.update({name: site_from_path(path).detect for name, path in own.items()})
    by_cluster = [name for name, each in signs.items() if cluster and cluster in each.cluster]
    by_host = [name for name, each in signs.items() if any(fnmatch.fnmatchcase(hostname, one) for one in each.hosts)]
    for found, what in ((by_cluster, f"cluster {cluster}"), (by_host, f"host {hostname}")):
        if len(found) > 1:
            raise Problem(f"{what} belongs to several sites: {', '.join(sorted(found))}", "choose one with --site")
        if found:
            return load_site(found[0], environ)
    by_variables = [name for name, each in signs.items() if each.variables and _all_set(each.variables, environ)]
    by_variables = [name for name in by_variables if name in own] or by_variables
    if len(by_variables) > 1:
        raise Problem(f"this job belongs to several sites: {', '.join(sorted(by_variables))}", "choose one with --site")
    return load_site(by_variables[0] if by_variables else DEFAULT, environ)


def _all_set(variables: Iterable[str], environ: Mapping[str, str]) -> bool:
    for variable in variables:
        name, equals, pattern = variable.partition("=")
        if not environ.get(name) or (equals and not fnmatch.fnmatchcase(environ[name], pattern)):
            return False
    return True


def detect_of(name: str) -> Detect:
    """Of a built-in profile. Only this key of it is read: every `drumbeat run` asks all of them."""
    found = re.search(r"^detect:.*(?:\n[ \t].*)*", _built_in_text(name), re.MULTILINE)
    return site_from_text(f"summary: x\n{found.group()}\n", name, f"sites/{name}.yaml").detect if found else Detect()


def _built_in_text(name: str) -> str:
    data = pkgutil.get_data("drumbeat.jobfile.sites", f"{name}.yaml")
    assert data is not None
    return data.decode()


def built_in() -> List[str]:
    from importlib import resources  # also reads out of a zip

    names = (entry.name for entry in resources.files("drumbeat.jobfile.sites").iterdir())
    return sorted(name[: -len(".yaml")] for name in names if name.endswith(".yaml"))


def user_folder(environ: Mapping[str, str]) -> str:
    config = users_folder(environ, "XDG_CONFIG_HOME", ".config")
    return os.path.join(config, "drumbeat", "sites")


def user_profiles(environ: Mapping[str, str]) -> Dict[str, str]:
    folder = user_folder(environ)
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return {}
    return {name[: -len(".yaml")]: os.path.join(folder, name) for name in names if name.endswith(".yaml")}
