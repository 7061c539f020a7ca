"""Finding a site: by name, by path, by detection; the user's own first."""

import socket

import pytest

from drumbeat import cli
from drumbeat.base.problem import Problem
from drumbeat.jobfile.check import keys_of
from drumbeat.jobfile.job import Job, job_from_text
from drumbeat.jobfile.site import (
    Detect,
    Site,
    SiteVariable,
    built_in,
    claimed_too,
    find_site,
    load_site,
    site_from_text,
    site_names,
)


def site_of(job, environ, hostname, cluster=None):
    return find_site(job.site, environ, hostname, cluster, job.where("site"))


@pytest.fixture
def home(tmp_path):
    (tmp_path / ".config/drumbeat/sites").mkdir(parents=True)
    return tmp_path


def profile(home, name, text):
    (home / f".config/drumbeat/sites/{name}.yaml").write_text(text)
    return {"HOME": str(home)}


def test_localhost_is_what_is_left():
    site = site_of(Job(), {}, "laptop")
    assert (site.name, site.backend, site.emulated, site.nodes) == ("localhost", "local", True, 1)
    assert site.env["GLOO_SOCKET_IFNAME"] == SiteVariable(
        "lo", "all ranks are on this machine, and gloo's own traffic runs on 127.0.0.1"
    )


@pytest.mark.parametrize("name", built_in())
def test_every_built_in_profile_is_right(name):
    assert load_site(name, {}).name == name


def test_a_profile_of_the_user_wins_over_the_built_in_one(home):
    environ = profile(home, "localhost", "summary: mine\nemulated: true\n")
    assert site_of(job_from_text("site: localhost"), environ, "h").summary == "mine"


def test_xdg_config_home_moves_the_folder(home):
    profile(home, "stairs", "summary: s\n")
    environ = {"HOME": "/nowhere", "XDG_CONFIG_HOME": str(home / ".config")}
    assert "stairs" in site_names(environ)
    assert load_site("stairs", environ).name == "stairs"


def test_by_path(tmp_path):
    (tmp_path / "mine.yaml").write_text("summary: m\ndetect: {hosts: [a*], cluster: [c]}\n")
    site = site_of(Job(site=str(tmp_path / "mine.yaml")), {}, "h")
    assert (site.name, site.detect) == ("mine", Detect(cluster=("c",), hosts=("a*",)))


def test_the_clusters_name_comes_before_the_hosts(home):
    profile(home, "stairs", "summary: s\ndetect: {hosts: ['step?']}\n")
    environ = profile(home, "roof", "summary: r\ndetect: {cluster: [roof]}\n")
    assert site_of(Job(), environ, "step7").name == "stairs"
    assert site_of(Job(), environ, "step77").name == "localhost"
    assert site_of(Job(), environ, "step7", cluster="roof").name == "roof"


def test_two_sites_that_claim_one_host_are_not_guessed_between(home):
    profile(home, "a", "summary: a\ndetect: {hosts: [n*]}\n")
    environ = profile(home, "b", "summary: b\ndetect: {hosts: [n1]}\n")
    with pytest.raises(Problem) as caught:
        site_of(Job(), environ, "n1")
    assert str(caught.value) == "host n1 belongs to several sites: a, b\n  choose one with --site"


def test_a_profile_knows_who_else_claims_its_hosts(home):
    profile(home, "a", "summary: a\ndetect: {hosts: ['login*', 'a*']}\n")
    environ = profile(home, "b", "summary: b\ndetect: {hosts: ['login*', 'b*']}\n")
    assert claimed_too(load_site("b", environ), environ) == ["a (login*)"]
    assert not claimed_too(load_site("localhost", environ), environ)


def test_sites_are_listed_where_two_of_them_claim_this_machine(home, monkeypatch, capsys):
    here = socket.gethostname()
    profile(home, "a", f"summary: a\ndetect: {{hosts: [{here}]}}\n")
    profile(home, "b", f"summary: b\ndetect: {{hosts: [{here}]}}\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert cli.main(["site", "list"]) == 0
    listed = capsys.readouterr().out
    marked = [line.split()[1] for line in listed.splitlines()[:-1] if line.startswith("*")]
    assert marked == ["a", "b"] and f"host {here} belongs to several sites: a, b" in listed


def test_an_unknown_site_names_the_nearest_and_all(home):
    with pytest.raises(Problem) as caught:
        site_of(job_from_text("command: x\nsite: localhots\n"), profile(home, "stairs", "summary: s\n"), "h")
    assert caught.value.what == "job.yaml:2: site: no site 'localhots'; did you mean 'localhost'?"
    assert (
        caught.value.fix.startswith("known sites: ")
        and "localhost" in caught.value.fix
        and "stairs" in caught.value.fix
    )


def test_a_path_that_leads_nowhere():
    with pytest.raises(Problem) as caught:
        site_of(job_from_text("site: ./none.yaml"), {}, "h")
    assert str(caught.value) == "job.yaml:1: site: no profile ./none.yaml"


@pytest.mark.parametrize(
    "text, message",
    [
        ("backend: local\n", "s.yaml:1: the site has no 'summary' (text; example: 4 MI250X per node, Slingshot 11)"),
        ("summary: s\npartition: gpu\n", "s.yaml:2: unknown key 'partition' in the site; "
         "write submit: {partition: {value: --partition=..., why: ...}}"),
        ("summary: s\nbackends: local\n", "s.yaml:2: unknown key 'backends' in the site; did you mean 'backend'?"),
        ("summary: s\nenv: {A: b}\n", "s.yaml:2: env.A: write {value: b, why: ...}, not 'b' alone"),
        ("summary: s\npaths: {a: /opt}\n", "s.yaml:2: paths.a: write {pattern: /opt, why: ...}, not '/opt' alone"),
        ("summary: s\nenv: {A: [b]}\n", "s.yaml:2: env.A: expected a mapping of mappings, got a list "
         "(example: {GLOO_SOCKET_IFNAME: {value: lo, why: nodes share one machine}})"),
        ("summary: s\nenv:\n  A: {value: b}\n", "s.yaml:3: env.A has no 'why' "
         "(text; example: the only routed interfaces)"),
        ("summary: s\nname: t\n", "s.yaml:2: unknown key 'name' in the site; known keys: " + ", ".join(keys_of(Site))),
    ],
)  # fmt: skip
def test_refused_profiles(text, message):
    with pytest.raises(Problem) as caught:
        site_from_text(text, "s", "s.yaml")
    assert str(caught.value) == message
