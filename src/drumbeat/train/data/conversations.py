"""Conversations and texts from folders of jsonl and parquet files, tokenised, packed into rows, mixed by weight.

A line is {"messages": [{"role": ..., "content": ...}]}, {"prompt": ..., "completion": ...} or {"text": ...}. The assistant's
messages count in the loss, and so do completions and texts; prompts do not. Several documents share a row: the positions of each
begin at 0, by which transformers' attention keeps them apart, and its first token is not predicted.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from drumbeat.train.checkpoint.checkpoints import first_line
from drumbeat.train.data import Batch, Pieces, Stream
from drumbeat.train.layers.cross_entropy import IGNORE
from drumbeat.train.refusal import Refusal

Document = Tuple[List[int], List[int]]  # tokens, and for each whether it counts
T = TypeVar("T")
_END: Mapping[str, Any] = {}  # after the last row


def lines_of(folder: str, use: Callable[[Mapping[str, Any]], T] = dict) -> Iterator[T]:  # type: ignore[assignment]
    """Yield `use(row)` of all rows of all *.jsonl and *.parquet files below a folder, in the order of their names; or of one such
    file. A row that cannot be read, or used, is refused with its place."""
    paths = [folder] if os.path.isfile(folder) else sorted(_below(folder))
    if not paths:
        raise Refusal(f"{folder}: no .jsonl or .parquet file in it", "give a folder of conversations or texts")
    for path in paths:
        rows, place = _rows(path), "row" if path.endswith(".parquet") else "line"
        for number in itertools.count(1):
            try:
                if (row := next(rows, _END)) is _END:
                    break
                # A null is how a table writes that the row has no value in that column.
                made = None if row is None else use({name: value for name, value in row.items() if value is not None})
            except Refusal as refusal:
                raise Refusal(f"{path}, {place} {number}: {refusal.what}", refusal.fix) from None
            except Exception as error:  # whatever files, tokenizers and chat templates raise
                what = f"{path}, {place} {number}: {type(error).__name__}: {first_line(error)}"
                raise Refusal(what, "correct this row, or leave it out") from error
            if made is not None:
                yield made


def _rows(path: str) -> Iterator[Optional[Mapping[str, Any]]]:
    """Yield the rows of a file; None for an empty line."""
    if path.endswith(".parquet"):
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise Refusal("reading parquet needs pyarrow", "pip install pyarrow, or give .jsonl files") from None
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
        return
    with open(path, "rb") as file:
        for line in file:
            yield _row(line) if line.strip() else None


def _row(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError:
        row = None
    if not isinstance(row, dict):
        raise Refusal("not a JSON object", "write one object per line")
    return row


def _below(folder: str) -> Iterator[str]:
    for place, _, names in os.walk(os.path.expanduser(folder)):
        yield from (os.path.join(place, name) for name in names if name.endswith((".jsonl", ".parquet")))


def documents(row: Mapping[str, Any], tokenizer: Any) -> List[Document]:
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    if "messages" in row:
        return conversation(row["messages"], tokenizer)
    if "prompt" in row and "completion" in row:
        asked = list(tokenizer(row["prompt"])["input_ids"])
        said = list(tokenizer(row["completion"], add_special_tokens=False)["input_ids"]) + end
        return [(asked + said, [0] * len(asked) + [1] * len(said))]
    if "text" in row:
        tokens = list(tokenizer(row["text"])["input_ids"]) + end
        return [(tokens, [1] * len(tokens))]
    raise Refusal(f"a row with {', '.join(row) or 'nothing'}", "rows have messages, prompt and completion, or text")


def conversation(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> List[Document]:
    """Tokenise with the tokenizer's chat template. An answer is what the template adds to the prompt for one. Where it writes an
    earlier answer otherwise than the last one (Qwen 3 drops thoughts, others move the system's message), the conversation up to
    that answer is a document of its own."""
    if not getattr(tokenizer, "chat_template", None):
        raise Refusal("the tokenizer has no chat template", "give rows with prompt and completion, or text")

    def tokens_of(part: Sequence[Mapping[str, str]], prompt: bool) -> List[int]:
        made = tokenizer.apply_chat_template(list(part), tokenize=True, add_generation_prompt=prompt, return_dict=False)
        return list(made)

    whole = tokens_of(messages, False)
    counts = [0] * len(whole)
    found = [(whole, counts)]
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            asked, until = tokens_of(messages[:i], True) if i else [], tokens_of(messages[: i + 1], False)
            first = len(os.path.commonprefix([asked, until]))
            if whole[: len(until)] == until:
                counts[first : len(until)] = [1] * (len(until) - first)
            else:
                found.append((until, [0] * first + [1] * (len(until) - first)))
    return found


class Packed:
    """Documents packed into rows of `length` tokens in order: one that does not fit into the rest of a row begins the next row,
    one that is longer than a row is cut. Inputs are (rows, 2, length): tokens and positions; targets are labels, not shifted."""

    def __init__(self, documents: Sequence[Document], length: int, padding: int) -> None:
        rows: List[List[Document]] = [[]]
        left = length
        self.documents, self.cut, self.empty = len(documents), 0, 0
        for tokens, counts in documents:
            if not sum(counts[1:length]):
                self.empty += 1  # nothing to learn
                continue
            self.cut += len(tokens) > length
            tokens, counts = tokens[:length], counts[:length]
            if len(tokens) > left:
                rows.append([])
                left = length
            rows[-1].append((tokens, counts))
            left -= len(tokens)
        rows = [row for row in rows if row]
        self.inputs = np.zeros((len(rows), 2, length), dtype=np.int64)
        self.inputs[:, 0] = padding
        self.labels = np.full((len(rows), length), IGNORE, dtype=np.int64)
        self.sizes = np.array(
            [sum(len(tokens) for tokens, _ in row) for row in rows], dtype=np.int64
        )  # without padding
        for i, row in enumerate(rows):
            at = 0
            for tokens, counts in row:
                end = at + len(tokens)
                self.inputs[i, 0, at:end], self.inputs[i, 1, at:end] = tokens, np.arange(end - at)
                self.labels[i, at + 1 : end] = np.where(counts[1:], tokens[1:], IGNORE)
                at = end
            self.inputs[i, 1, at:] = np.arange(length - at)  # padding is a document of its own, and none of it counts

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, indices: List[int], epochs: List[int]) -> Batch:
        return torch.from_numpy(self.inputs[indices]), torch.from_numpy(self.labels[indices])


class Mixture:
    """Rows of several sources, mixed by weight: an epoch takes each source's share, repeating a source that is too small. The
    rows of a step depend on its number alone, so a resumed run continues exactly."""

    def __init__(self, weighted: Sequence[Tuple[Packed, float]]) -> None:
        weighted = [(source, weight) for source, weight in weighted if len(source)]
        sources, weights = [source for source, _ in weighted], [weight for _, weight in weighted]
        total = sum(map(len, sources))
        counts = [max(1, round(total * weight / sum(weights))) for weight in weights]
        self.sources = sources
        self.table = [(s, j % len(source)) for s, source in enumerate(sources) for j in range(counts[s])]
        self.sizes = np.array([sources[s].sizes[row] for s, row in self.table], dtype=np.int64)

    @property
    def largest(self) -> int:
        """Return the largest number of a token."""
        return max((int(source.inputs[:, 0].max()) for source in self.sources), default=0)

    def __len__(self) -> int:
        return len(self.table)

    def read(self, indices: List[int], epochs: List[int]) -> Batch:
        rows = [
            self.sources[s].read([row], [epoch]) for (s, row), epoch in zip((self.table[i] for i in indices), epochs)
        ]
        return torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])


def named(x: Tensor, y: Tensor) -> Dict[str, Any]:
    """Return a batch in the form that transformers' models take. With a cache they would ignore where documents begin."""
    tokens, positions = x.unbind(1)
    return {"input_ids": tokens.contiguous(), "position_ids": positions.contiguous(), "labels": y, "use_cache": False}


class NamedStream(Stream):
    def __next__(self) -> Pieces:
        return Pieces(named(x, y) for x, y in super().__next__())  # type: ignore[misc]
