"""The five source documents: every erratum that a script can show is found, at its own line."""

import os
from pathlib import Path

import pytest

from drumbeat.lint.engine import lint

SEEDS = Path(os.environ.get("DRUMBEAT_SEEDS") or Path(__file__).parents[3] / "shared" / "seeds")
pytestmark = pytest.mark.skipif(not SEEDS.is_dir(), reason="the source documents are not here (DRUMBEAT_SEEDS)")

# erratum or requirement -> (code, lines)
EXPECTED = {
    "000": {
        "E0-a": ("typographic-character", [306, 312]),
        "E0-b": ("wrong-folder-after-clone", [239, 270]),
        "E0-c": ("export-of-itself", [302]),
        "E0-d": ("devices-sorted-as-text", [165, 196]),
        "E0-d list": ("hca-list-fixed", [184]),
        "E0-e": ("rdma-last-field", [165]),
        "E0-f": ("gid-fixed", [205]),
        "E0-g": ("script-without-sbatch-lines", [276]),
        "E0-h": ("llama-arguments-shifted", [312]),
        "E0-j": ("loader-config-appended", [97]),
        "S0-09": ("localhost-by-default", [116]),
        "S0-19": ("export-of-prose", [303]),
    },
    "001": {
        "E1-a": ("pipeline-module-gone", [174]),
        "E1-a rpc": ("rpc-one-name", [177]),
        "E1-b": ("launch-deprecated", [264, 308, 311]),
        "E1-c": ("rank-as-device", [117, 120, 278, 281, 442, 529]),
        "E1-d": ("wrap-policy-gone", [326, 336]),
        "E1-e": ("cuda-amp-deprecated", [379, 524]),
        "E1-f": ("variable-dead", [70]),
        "E1-f twice": ("visibility-twice", [69]),
        "E1-g": ("interface-excludes-only-lo", [83]),
        "E1-h": ("comm-hook-twice", [454]),
        "E1-i": ("accumulation-syncs", [366]),
        "E1-j": ("oom-by-text", [426]),
        "E1-k": ("openib-excluded", [97]),
        "E1-l": ("megatron-old-imports", [200, 201, 590, 592, 593, 594, 595, 596, 598]),
        "device": ("set-device-missing", [293]),
        "gradients": ("zero-grad-missing", [190, 349]),
        "names": ("name-undefined", [278, 606]),
        "S1-05": ("debug-left-on", [82]),
        "S1-19": ("debug-left-on-python", [473]),
    },
    "002": {
        "E2-a": ("variable-as-command", [235, 299, 339, 347, 351, 355]),
        "E2-b": ("variable-dead", [299, 303]),
        "E2-c": ("masks-overlap", [90]),
        "E2-d": ("taskset-of-a-rank", [311]),
        "E2-e": ("quote-unclosed", [91]),
        "E2-f": ("semicolon-missing", [410]),
        "E2-g": ("text-damaged", [420]),
        "E2-h": ("dollar-escaped", [287, 311, 319]),
        "E2-h Dict": ("dict-not-a-type-hint", [455]),
        "E2-j": ("not-exported", [273]),
        "E2-k": ("local-rank-missing", [351]),
        "E2-l": ("port-fixed", [254, 262, 343]),
        "E2-m": ("rocprof-old", [411, 420]),
        "E2-n": ("open-listener", [384]),
        "E2-o": ("pip-global-option", [536]),
        "S2-12": ("debug-left-on", [163, 167, 191, 245]),
        "S2-16": ("master-is-own-host", [253]),
        "S2-17": ("scontrol-in-container", [269]),
    },
    "003": {
        "optimizer": ("optimizer-in-loop", [194]),
        "E3-b": ("text-after-backslash", [49]),
        "E3-c": ("exit-code-lost", [150, 219]),
        "E3-d": ("gid-by-grep", [64, 96, 105, 121]),
        "E3-f": ("csub-option-gone", [27, 219]),
        "E3-g": ("runai-first-cli", [19]),
        "E3-h, E3-k": ("init-with-pod-rank", [173]),
        "E3-i": ("sockets-with-rdma", [66, 107, 123]),
        "E3-j": ("role-with-colon", [147]),
        "E3-j tee": ("tee-stdout-only", [149]),
        "S3-13": ("debug-left-on", [125]),
    },
    "004": {
        "E4-c": ("cores-for-one-task", [31]),
        "E4-d": ("kill-by-pattern", [100]),
        "E4-d node": ("monitor-on-one-node", [69]),
        "E4-e": ("fabric-unset", [72]),
        "E4-f": ("version-in-path", [41, 42, 44]),
        "E4-g": ("system-libraries-bound", [76]),
        "E4-g address": ("first-address", [58]),
        "E4-g port": ("port-fixed", [95]),
        "E4-g twice": ("container-variable-twice", [81]),
    },
}


def found(document):
    (path,) = SEEDS.glob(f"{document}_*.txt")
    return lint(path.read_text("utf-8"), path.name).findings


@pytest.mark.parametrize("document", EXPECTED)
def test_every_erratum_is_found_and_nothing_else(document):
    lines = {}
    for finding in found(document):
        lines.setdefault(finding.code, []).append(finding.evidence[0].line)
    assert lines == dict(EXPECTED[document].values())
