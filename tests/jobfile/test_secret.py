"""What looks secret, and that it is neither printed nor written anywhere."""

import subprocess
import time

import pytest

from drumbeat.base.redact import in_text, in_words, is_secret, redact
from drumbeat.findings.model import Evidence, Finding
from tests.jobfile.test_resolve import refusal

SECRET = [
    ("PGPASSWORD", "x"), ("OPENAI_KEY", "d41d8cd98f00"), ("DB_PASS", "hunter2"), ("GITHUB_PAT", "x"), ("MY_TOKEN", "x"),
    ("DATABASE_URL", "postgres://ada:pw@db/x"), ("REDIS_URL", "redis://:pw@h:6379"), ("hf_token", "abc"),
    ("NOTE", "hf_abcdefghijklmnopqr"), ("SLURM_JWT", "x"), ("X", "-----BEGIN OPENSSH PRIVATE KEY-----"),
]  # fmt: skip
HARMLESS = [
    ("NUM_TOKENS", "4096"), ("MAX_TOKENS", "131072"), ("SORT_KEY", "name"), ("PWD", "/home/ada"), ("NCCL_IB_PKEY", "0"),
    ("SSH_AUTH_SOCK", "/run/x"), ("HF_TOKEN_PATH", "/home/ada/t"), ("HTTP_PROXY", "http://proxy:3128"), ("COMPASS", "n"),
    ("TOKENIZERS_PARALLELISM", "false"), ("KEYBOARD", "us-international"), ("HF_TOKEN", ""), ("PATHS", "/a"),
]  # fmt: skip


@pytest.mark.parametrize("name,value", SECRET)
def test_secret_variables(name, value):
    assert is_secret(name, value)


@pytest.mark.parametrize("name,value", HARMLESS)
def test_harmless_variables(name, value):
    assert not is_secret(name, value)


@pytest.mark.parametrize(
    "command,holder",
    [
        ("python t.py --token abcdef", "--token"), ("python t.py --hub_token=abcdef", "--hub_token"),
        ("env HF_TOKEN=abc python t.py", "HF_TOKEN"), ("x --api_key abc123def", "--api_key"), ("x --password pw", "--password"),
        ("x --wandb.key=0123456789abcdef", "--wandb.key"), ("wget http://u:p@h/x", "a URL with a password"),
        ("x hf_abcdefghijklmnopqrstuv", "an access token"), ("x --eos-token </s>", None), ("x --eos_token 50256", None),
        ("x --max-tokens 4096", None), ("x --use_auth_token True", None), ("x --text-key text", None), ("x --token -v", None),
        ("x --tokenizer gpt2 --json-keys text --tokens-per-sample 512", None), ("x --hub_token $HF_TOKEN", None),
        ("t.py hf.token=s3 ", "hf.token"), ("t.py +trainer.api_key=s3", "+trainer.api_key"), ("x data.key=image_features", None),
        ("t.py tokenizer.pad_token=s3", None), ("t.py hf.token=null", None), ("curl -u me:s3 h", "curl -u"),
        ("t.py --data {\"api_key\":\"s3\"}", "api_key"), ("curl -H X-Api-Key:s3 h", "X-Api-Key"), ("mysql -ps3 db", "mysql -p"),
        ("wandb login 0123456789abcdef0123", "wandb login"), ("wandb login --host https://wandb.example.org/x", None),
        ("python -u t.py a:b", None), ("mysql -p db", None), ("x model.token_embedding.dim=128", None),
        ("torchrun --rdzv_id=abc --rdzv_endpoint=h:29500 t.py", None),
    ],
)  # fmt: skip
def test_words_of_a_command(command, holder):
    assert in_words(command.split()) == holder


def test_words_with_a_script_inside():
    assert in_words(["bash", "-c", "HF_TOKEN=abc123 python t.py"]) == "HF_TOKEN"
    assert in_words(["bash", "-c", 'exec python t.py --token "$HF_TOKEN"']) is None


@pytest.mark.parametrize(
    "text,shown",
    [
        ("export HF_TOKEN=abc1234", "export HF_TOKEN=…"),
        ("curl -H 'Authorization: Bearer abcdefgh123' x", "curl -H 'Authorization: Bearer …' x"),
        ("git clone https://me:pw@x/y", "git clone https://me:…@x/y"),
        ("HF_TOKEN: hf_abcdefghijklmnopqrst # mine", "HF_TOKEN: … # mine"),
        ("wandb login --token 'abcdefgh' --host h", "wandb login --token '…' --host h"),
        ("curl -H 'X-Api-Key: s3' h", "curl -H 'X-Api-Key: …' h"),
        ('{"api_key": "s3", "eos_token": "end"}', '{"api_key": "…", "eos_token": "end"}'),
        ("t.py hf.token=s3 +a.api_key=s4", "t.py hf.token=… +a.api_key=…"),
        ("curl -s -u me:s3 h && mysql -ps3 db", "curl -s -u me:… h && mysql -p… db"),
        ("password=hunter2 user=ada", "password=… user=ada"),
    ],
)
def test_secrets_in_text_are_hidden(text, shown):
    assert redact(text) == shown and in_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "export HF_TOKEN=$(cat f)", "tokens: 12345678", "SyntaxError: unexpected token: 1234567", "tokens_per_s=1234567.8",
        "Missing key(s) in state_dict: transformer.h.0", "KeyError: 'model.layers.0.weight'", "ssh://git@host/x",
        "Loading checkpoint key: model.layers.0", "https://user@host/path", "x --hub-token\nenvironment: 3", "DB_PASS:\nfoo: 1",
    ],
)  # fmt: skip
def test_other_text_stays(text):
    assert redact(text) == text and in_text(text) is None


def test_evidence_and_titles_never_hold_one():
    finding = Finding("x", "error", "export DB_PASS=hunter2", evidence=(Evidence("HF_TOKEN=abc1234"),))
    assert finding.title == "export DB_PASS=…" and finding.evidence[0].text == "HF_TOKEN=…"


def test_long_lines_take_no_longer_than_their_length():
    started = time.process_time()
    for text in ("a=" * 50_000, "--a " * 30_000, "key " * 30_000, "://" + "a" * 100_000, "authorization:" * 10_000):
        redact(text)
    assert time.process_time() - started < 5


REFUSED = [
    ("env: {DB_PASS: hunter2s3cret}", "env.DB_PASS"),
    ("env: {DATABASE_URL: 'postgres://ada:s3cret@db/x'}", "env.DATABASE_URL"),
    ("env: {OPENAI_KEY: s3cret-0123}", "env.OPENAI_KEY"),
    ("command: python -c 1 --token s3cret", "command: --token"),
    ("setup: export HF_TOKEN=s3cret", "setup: HF_TOKEN"),
    ("setup: 'curl -H \"Authorization: Bearer s3cret-0123\" x'", "setup: an Authorization header"),
    ("wrap: {ranks: [0], command: env API_KEY=s3cret --}", "wrap.command: API_KEY"),
]


@pytest.mark.parametrize("line,place", REFUSED)
def test_a_literal_secret_is_refused_with_the_way_out(line, place):
    said = refusal(line + ("\n" if line.startswith("command") else "\ncommand: 'true'\n"))
    assert place in said and "looks secret" in said and ": pass" in said and "s3cret" not in said


def test_nothing_is_started_or_written(drumbeat):
    (drumbeat.folder / "job.yaml").write_text("command: python -c 1 --token s3cret\n")
    for word in ("plan", "run"):
        done = drumbeat.here(word, "job.yaml")
        assert done.returncode == 2 and "looks secret" in done.stderr and "s3cret" not in done.stdout + done.stderr
    assert not (drumbeat.folder / "runs").exists()


def test_a_comment_of_the_job_file_is_not_copied(drumbeat, monkeypatch):
    monkeypatch.setenv("DB_PASS", "handed-on-s3cret")
    job = drumbeat.folder / "job.yaml"
    job.write_text("command: sh -c 'test $$DB_PASS = handed-on-s3cret'\nenv: {DB_PASS: pass}\n# DB_PASS=old-s3cret\n")
    job.write_text(job.read_text().replace("handed-on-s3cret'", "$$(printf %s-%s-%s handed on s3cret)'"))
    done = drumbeat("run", "job.yaml")
    assert done.returncode == 0, done.stderr
    for needle in ("handed-on-s3cret", "old-s3cret"):
        found = subprocess.run(["grep", "-rl", needle, "runs"], cwd=drumbeat.folder, capture_output=True, text=True)
        assert found.stdout == ""


@pytest.mark.parametrize(
    ("script", "log"),
    [
        (
            "python t.py --token s3cret0123 --api-key=s3cret4567",
            "RuntimeError: cannot reach https://ada:s3cret@host/x with HF_TOKEN=s3cret",
        ),
        (
            "curl https://x.y/z?token=s3cret0123 | bash\nsrun python t.py",
            "ModuleNotFoundError: No module named 'x' (from https://x.y/s?token=s3cret0123 and https://b.net/x?sv=2&sig=s3cretZm9v)",
        ),
    ],
)
def test_lint_and_diagnose_repeat_none(drumbeat, script, log):
    (drumbeat.folder / "run.sh").write_text(f"#!/bin/bash\n{script}\n")
    (drumbeat.folder / "x.log").write_text(f"{log}\n")
    for words in (
        ("lint", "run.sh"),
        ("lint", "--json", "run.sh"),
        ("diagnose", "x.log"),
        ("diagnose", "--json", "x.log"),
    ):
        done = drumbeat.here(*words)
        assert "s3cret" not in done.stdout + done.stderr
    assert "secret-in-script" in drumbeat.here("lint", "--json", "run.sh").stdout
