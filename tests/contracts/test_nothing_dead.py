"""What nobody uses is not kept: functions, classes and constants of the product are named somewhere besides their definition."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "drumbeat"
DEFINED = re.compile(r"^(?: *(?:async )?(?:def|class) (\w+)|([A-Z_]\w*)(?::[^=\n]+)? = )", re.M)
WORD = re.compile(r"\w+")
CALLED_BY = {  # by the library or the page that finds them by name
    "yaml": {"ignore_aliases"},
    "zipimport": {"get_filename"},
    "argparse": {"_print_message"},
    "accelerate": {"store_init_configuration"},
    "transformers": {"on_log"},
    "lightning": {"log_hyperparams", "log_metrics"},
    "jax": {
        "is_env_present", "get_coordinator_address", "get_process_count", "get_process_id", "get_local_process_id",
    },
    "textual": {
        "open_rank", "open_node", "check_action", "action_events", "action_filter", "action_no_filter", "filter_changed",
    },
    "events.jsonl": {"AgentStarted", "AgentEnded", "KernelLogRead"},  # by the name that `Event` registers them under
    "tests and benches": {"documents_of", "reference_product"},
}  # fmt: skip


def test_every_name_is_used():
    source = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    words = Counter(word for text in source.values() for word in WORD.findall(text))
    pages = (*ROOT.glob("docs/**/*.md"), *ROOT.glob("contributing/*.md"))
    for path in (*SOURCE.rglob("*.sh"), *SOURCE.rglob("*.html"), *SOURCE.rglob("*.js"), *pages):
        words.update(WORD.findall(path.read_text(encoding="utf-8")))
    known = {name for names in CALLED_BY.values() for name in names}
    dead = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path, text in source.items()
        for pair in DEFINED.findall(text)
        for name in filter(None, pair)
        if words[name] == 1 and not name.startswith("__") and name not in known
    }
    assert not dead, "nobody uses: " + ", ".join(sorted(dead))


def test_the_list_is_no_longer_than_it_must_be():
    defined = {name for path in SOURCE.rglob("*.py") for pair in DEFINED.findall(path.read_text()) for name in pair}
    assert {name for names in CALLED_BY.values() for name in names} <= defined
