"""Prefix caching: texts that begin alike are read once.

Whole blocks of keys and values stay in the pool when their row has left it, among the free blocks, until they are allocated for something
else. They are found by a chain of SHA-256 over all that decides their bits: model, type, family of kernels, salt, and the text up to the
block's end; the block's own tokens are compared too. Only what a settled step has written is published, prompts and generated text alike.

A head that drafts, as EAGLE's, keeps at each position a state that depends on the token after it too. Its blocks are found by that token
as well. Where a block is followed by another token than before, only its last state is of no use: the row starts one state earlier, on a
copy of the block, and the head makes that state anew, from the target's features there, which are kept (`KVCache.boundaries`). So the
head is where the target is, and no hit is lost. A draft model starts with what is found of its own, and catches up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from echelon.kv.blocks import NO_TOKEN, BlockContent, BlockTables
from echelon.sequence import Sequence


@dataclass(frozen=True)
class CachedTables:
    """The tables of one cache. With `reads_next` a state depends on the token after it, and rows start where the target does; other tables
    but the target's may start earlier or later.
    """

    tables: BlockTables
    reads_next: bool = False


@dataclass
class _Text:
    """A row's text as a chain of whole blocks, and how many of them each of the tables has published."""

    root: bytes
    num_published: list[int]
    blocks: list[tuple[bytes, bytes]] = field(default_factory=list)  # (key, tokens)

    def extend(self, tokens: SequenceOf[int], block_size: int) -> None:
        """Add the blocks that have become whole."""
        for index in range(len(self.blocks), len(tokens) // block_size):
            own = np.array(tokens[index * block_size : (index + 1) * block_size], np.int32).tobytes()
            before = self.blocks[-1][0] if self.blocks else self.root
            self.blocks.append((hashlib.sha256(before + own).digest(), own))


class PrefixCache:
    """What is kept of texts, in the tables of target and drafter; the target's come first.

    root         digest of all but the text that decides the bits of a row's keys and values; another one starts the row's chain anew
    num_queries  tokens of texts looked up so far
    num_hits     those of them that had keys and values
    """

    def __init__(self, caches: SequenceOf[CachedTables], root: Callable[[Sequence], bytes]) -> None:
        self._caches, self._root = caches, root
        self._block_size = caches[0].tables.block_size
        self._texts: dict[int, _Text] = {}
        self.num_queries = self.num_hits = 0

    def adopt(self, sequence: Sequence) -> int:
        """Start a row, which holds nothing yet, with the longest beginning of its text that is kept, in whole blocks; how many tokens. At
        least one token is left to be computed, for its logits.
        """
        tokens = sequence.tokens
        text = self._text_of(sequence)
        text.num_published = [0] * len(self._caches)
        found = [self._find(cache, text, tokens) for cache in self._caches]
        is_bound = [i == 0 or cache.reads_next for i, cache in enumerate(self._caches)]  # to start where the target does
        count = min(len(blocks) for bound, (blocks, _) in zip(is_bound, found, strict=True) if bound)
        for i, (cache, (blocks, is_same)) in enumerate(zip(self._caches, found, strict=True)):
            kept = blocks[:count] if is_bound[i] else blocks
            lacks_last = not is_same and len(kept) == len(blocks)
            if kept:
                cache.tables.adopt(sequence.id, kept, len(kept) * self._block_size - lacks_last)
                text.num_published[i] = len(kept) - lacks_last
        return count * self._block_size

    def _find(self, cache: CachedTables, text: _Text, tokens: SequenceOf[int]) -> tuple[list[int], bool]:
        """The blocks kept of a text's beginning; false where the last is followed by another token than here."""
        blocks: list[int] = []
        for index in range((len(tokens) - 1) // self._block_size):
            found = cache.tables.pool.find(self._content(cache, text, tokens, index))
            if found is None:
                break
            blocks.append(found[0])
            if not found[1]:
                return blocks, False
        return blocks, True

    def publish(self, sequence: Sequence) -> None:
        """Let others find the whole blocks of a row whose tokens are settled."""
        tokens = sequence.tokens
        known = [min(c.tables.num_cached(sequence.id), len(tokens) - c.reads_next) // self._block_size for c in self._caches]
        before = self._texts.get(sequence.id)
        if before is not None and all(n <= done for n, done in zip(known, before.num_published, strict=True)):
            return  # no block has become whole
        text = self._text_of(sequence)
        for i, cache in enumerate(self._caches):
            for index in range(text.num_published[i], known[i]):
                cache.tables.publish(sequence.id, index, self._content(cache, text, tokens, index))
                text.num_published[i] = index + 1

    def count(self, num_tokens: int, num_hits: int) -> None:
        """Count a text that was looked up by a row which has entered."""
        self.num_queries += num_tokens
        self.num_hits += num_hits

    def begins_anew(self, sequence: Sequence) -> None:
        """The row has given back what it had adopted: it will publish its text from the first block on."""
        if (text := self._texts.get(sequence.id)) is not None:
            text.num_published = [0] * len(self._caches)

    def forget(self, sequence: Sequence) -> None:
        """The row has left; what has been published stays."""
        self._texts.pop(sequence.id, None)

    @property
    def num_unused(self) -> int:
        """Free blocks of the target whose keys and values are kept."""
        return self._caches[0].tables.pool.num_unused

    def clear(self) -> None:
        """Forget everything; rows keep what they hold."""
        for cache in self._caches:
            cache.tables.pool.drop_all()

    def _text_of(self, sequence: Sequence) -> _Text:
        root, text = self._root(sequence), self._texts.get(sequence.id)
        if text is None or text.root != root:
            text = self._texts[sequence.id] = _Text(root, [0] * len(self._caches))
        text.extend(sequence.tokens, self._block_size)
        return text

    def _content(self, cache: CachedTables, text: _Text, tokens: SequenceOf[int], index: int) -> BlockContent:
        return BlockContent(*text.blocks[index], tokens[(index + 1) * self._block_size] if cache.reads_next else NO_TOKEN)
