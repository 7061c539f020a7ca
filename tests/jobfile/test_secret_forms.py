"""A secret never survives in a line, in whatever form programs write it; what only looks similar stays."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.base.redact import in_words, redact
from drumbeat.findings.model import Evidence, Finding, Verdict, clipped

FORMS = [
    "https://git.example.com/?access_token={}", "https://pypi.corp/simple?a=1&token={}&b=2", "(from https://x.y/z?v=2&sig={})",
    "curl https://x.y/z?api_key={}", "s3://b/k?X-Amz-Signature={}&x=1", "wss://h/x?X-Amz-Security-Token={}",
    "postgres://u:p4ss@db/x?sslpassword={}", "https://bob:{}@git.example.com/x", "mongodb://bob:pa/{}@h", "redis://:{}@h:6379/0",
    "{{'user': 'bob', 'password': '{} with space'}}", "{{'password': 'with {} space', 'token': None}}", '{{"api_key": "{}"}}',
    '{{"password": "a \\"quoted\\" {}"}}', '"{{\\"password\\": \\"{}\\"}}"', "password='with {} space'", 'db_pass: "{}"',
    "password={}", "passwd={} user=bob", "HF_TOKEN={}", "WANDB_API_KEY: {}", "AccountKey={};EndpointSuffix=x", "clientSecret={}",
    "--token {}", "--password '{} with space'", "--hub-token={}", "['git', 'push', '--password', '{}']", "['x', '--api-key={}']",
    "sshpass -p {} ssh host", "sshpass -p'{}' ssh host", "redis-cli -h h -a {} ping", "docker login -u bob -p {} r.example.com",
    "curl -u me:{} h", "mysql -p{} db", "Authorization: Bearer {}", "'Authorization': 'Basic {}'", "X-Api-Key: {}",
    "password is {} ;", "the passphrase was '{}'", "Incorrect API key provided: {}", "WANDB key {}", "sk_live_{}", "hf_{}",
    "https://{}@github.com/x", "-----BEGIN RSA PRIVATE KEY-----\\n{}\\n-----END RSA PRIVATE KEY-----", "url: https://x/y?token={}",
    "glpat-{}", "t.py hf.token={}", "Namespace(user='bob', token='{}')",
    "t.py --host-key {}",
]  # fmt: skip
NEAR_MISSES = [
    "tokens=4096", "max_tokens=131072 top_p=0.9", "num_tokens: 4096", "eos_token=endoftext", "eos_token: '<|im_end|>'",
    '{"eos_token": "endoftext", "pad_token": "unk"}', "pad_token=abcdef123", "token=4096", "/data/tokens/shard-00012.bin",
    "https://x.y/z?page=2&sort_key=name&max_tokens=4096", "http://proxy:3128/x@y", "https://registry:4873/@scope/pkg",
    "https://user@host/path", "https://huggingface.co/meta/x/resolve/main/tokenizer.json?download=true", "sig=0.05 lr=0.1",
    "password is required", "password is incorrect", "signal 15 (SIGTERM) key=model.layers.0.weight", "ssh -p 2222 host",
    "cache key 0123456789abcdef0123456789abcdef", "python -u train.py -p 8080", "HEAD is 0123456789abcdef01234567",
    "unexpected token: 'foo'", "password: prompt", "use_auth_token=True", "Missing key(s) in state_dict: a.b.0",
    "/home/ada/secrets/key.pem", "torchrun --rdzv_endpoint=h:29500 --rdzv_id=abc123def456", "login node -p gpu: 3 idle",
    "t.py --input_key context_messages --sort-key=length.desc",
]  # fmt: skip

secrets = st.text(string.ascii_letters + string.digits, min_size=20, max_size=60).filter(
    lambda text: any(map(str.isdigit, text)) and any(map(str.isalpha, text))
)
forms = st.sampled_from(FORMS)
words = st.lists(
    st.sampled_from(["step 1 loss 2.0", "RuntimeError: cannot reach", "[rank1]:", "OSError: 28", "at", "key", "http://a/b", "x"]),
    max_size=3,
)  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True)
@given(secrets, st.lists(forms, min_size=1, max_size=3), words, words, st.sampled_from([" ", " ; ", ", ", "\t"]))
def test_no_secret_survives_in_a_line(secret, chosen, before, after, between):
    line = between.join([*before, *(form.format("Zq" + secret) for form in chosen), *after])
    assert secret not in redact(line), redact(line)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_hidden_alone_and_the_rest_of_it_stays(form):
    shown = redact(form.format("Zq4bcdefghij0123456789xyz"))
    assert "4bcdefghij" not in shown and "…" in shown
    assert shown[:4] == form.replace("{{", "{")[:4] or form.startswith(("https://{}", "hf_", "sk_", "glpat"))


PASSWORDS = [form for form in FORMS if any(word in form for word in ("pass", "-p", "-a ", "https://bob", "-u me"))]


@pytest.mark.parametrize("form", PASSWORDS)
def test_short_passwords_where_the_name_says_it(form):
    assert "hunter2" not in redact(form.format("hunter2"))


@pytest.mark.parametrize("text", NEAR_MISSES)
def test_near_misses_stay(text):
    assert redact(text) == text


def test_two_that_overlap_are_hidden_to_the_end_of_the_longer():
    assert "tail99" not in redact("password='a https://u:pw@h/x tail99' --token b")


def test_nothing_that_a_finding_or_verdict_says_holds_one():
    url = "https://git.example.com/?access_token=abcdef123456"
    finding = Finding(
        "x", "error", f"no {url}", f"cause {url}", f"fix {url}", (Evidence(url),), seen=(url,), unseen=(url,)
    )
    verdict = Verdict("x", "y", "likely", f"no {url}", (finding,), seen=(url,), unseen=(url,))
    assert "abcdef" not in repr(finding) + repr(verdict)


def test_an_argument_with_one_is_refused():
    assert in_words(["wget", "https://x.y/z?token=abcdef123456"]) == "token"
    assert in_words(["sshpass", "-p", "hunter2", "ssh", "h"]) == "sshpass -p"
    assert in_words(["wget", "https://x.y/z?token=$TOKEN"]) is None


def test_a_line_that_is_cut_in_the_middle_of_one_holds_none_of_it(drumbeat):
    for blanks in range(460, 520):
        assert "s3cr" not in Evidence(clipped("x" * blanks + " https://ada:s3cret0123456789@host/x", 500)).text
    (drumbeat.folder / "x.log").write_text(f"KeyError: '{'x' * 960} https://ada:s3cret0123456789@host/x'\n")
    assert "s3cr" not in drumbeat.here("diagnose", "--json", "x.log").stdout


def test_the_end_of_a_run_quotes_none(drumbeat):
    (drumbeat.folder / "t.py").write_text(
        "raise RuntimeError('cannot reach https://git.example.com/?access_token=' + 's3' + 'cret0123')\n"
    )
    assert drumbeat("run", "--", "python", "t.py").returncode == 1
    (run,) = (drumbeat.folder / "runs").iterdir()
    for words in (("status", str(run)), ("diagnose", str(run)), ("diagnose", "--json", str(run)), ("report", str(run))):
        done = drumbeat.here(*words)
        assert "access_token=…" in done.stdout or words[0] == "report", done.stdout
        assert "s3cret" not in done.stdout + done.stderr
    records = [path for path in run.rglob("*.json*") if path.is_file()]
    assert len(records) > 4 and not any(b"s3cret" in path.read_bytes() for path in records)
