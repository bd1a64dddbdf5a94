"""One-line faults in accept, bonus, noise, roll back, catch-up, copy-on-write, kept prefixes, admission and steps in flight; each must be killed by the test it names.

`python -m tools.mutants [NAME ...]` patches a copy of the source, one fault at a time, and runs the named test against it in a process
of its own. A fault that survives, a test that fails without it too, or a patch that no longer applies, fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools import ROOT

BLOCKS = "tests/ops/test_triton.py::test_blocks_of_their_own_size_are_right"
LOSSLESS = "tests/promises/test_lossless.py::test_speculation_changes_no_token"
PREFIXES = "tests/core/test_prefix_cache.py"
HITS = "tests/promises/test_prefix_hits.py::test_a_hit_has_the_bits_of_a_cold_start"
HEADS = "tests/promises/test_heads_lossless.py::test_heads"
AHEAD = "tests/model/test_ahead.py"
LANES, BOOKS_OF_LANES = "tests/promises/test_lanes.py", "tests/core/test_scheduler.py::TestLaneSchedulerMachine"
PASS_PLAN = "tests/parallel/test_pass_plan.py"


@dataclass(frozen=True)
class Mutant:
    """Replace `old`, which stands once in `file`, by `new`; `killer` must fail then."""

    name: str
    file: str
    old: str
    new: str
    killer: str


MUTANTS = [
    Mutant("accept a wrong token", "acceptance.py", "parent == at and token == target[at + 1]", "parent == at", f"{LOSSLESS}[1-always_wrong-3-greedy]"),
    Mutant("accept from any node", "acceptance.py", "if parent == at and token", "if token", "tests/core/test_acceptance.py"),
    Mutant("bonus from the wrong place", "acceptance.py", "last = path[-1] + 1 if path else 0", "last = 0", f"{LOSSLESS}[1-always_right-3-greedy]"),
    Mutant("recovered token one too late", "acceptance.py", "last = path[-1] + 1 if path else 0", "last = path[-1] if path else 0", "tests/core/test_acceptance.py"),
    Mutant("logits of the neighbour", "acceptance.py", "first = bounds[i] + row.num_prompt_logits", "first = i", "tests/core/test_acceptance.py"),
    Mutant("argmax misses the tail", "acceptance.py", "rest.max(-1) > best.max(-1)", "rest.max(-1) < best.min(-1)", "tests/core/test_sampling.py"),
    Mutant("noise ignores the position", "sampling.py", "_mix((position * _GOLDEN + 2) & _MASK)", "_mix(2)", "tests/core/test_sampling.py"),
    Mutant("noise ignores the sample", "sampling.py", "_mix((index * _GOLDEN + 1) & _MASK)", "_mix(1)", "tests/core/test_sampling.py"),
    Mutant(
        "drafted places share one noise",
        "ops/sample.py",
        "return len(self.tokens) + len(self.path)",
        "return len(self.tokens)",
        f"{LOSSLESS}[1-always_right-3-sampled]",
    ),
    Mutant("penalties ignore the path", "sampling.py", "self._text_counts.of(tokens, path)", "self._text_counts.of(tokens, ())", "tests/promises/test_parameters.py"),
    Mutant("min_tokens ignores the path", "sampling.py", "len(tokens) + len(path) - self", "len(tokens) - self", "tests/promises/test_parameters.py"),
    Mutant("top_p keeps one too few", "sampling.py", '"left")) - 1', '"left")) - 2', "tests/core/test_sampling.py"),
    Mutant("keep the last accepted too few", "engine.py", "row.start + row.num_new, kept.path)", "row.start + row.num_new, kept.path[:-1])", f"{LOSSLESS}[1-always_right-3-greedy]"),
    Mutant("keep a rejected slot", "engine.py", "row.start + row.num_new, kept.path)", "row.start + row.num_new, [*kept.path, len(kept.path)][: row.max_draft_tokens])", f"{LOSSLESS}[1-random-3-greedy]"),
    Mutant("draft cache keeps rejected tokens", "drafters/draft_model.py", "min(cached, len(row.sequence) + num_kept)", "cached", f"{LOSSLESS}[1-draft_model-3-greedy]"),
    Mutant("draft cache forgets to catch up", "drafters/draft_model.py", "known = sequence.tokens[start:] +", "known = sequence.tokens[-1:] +", f"{LOSSLESS}[1-draft_model-3-greedy]"),
    Mutant("released blocks are kept", "kv/blocks.py", "        elif self._counts[block] == 0:\n", "        elif self._counts[block] < 0:\n", "tests/kv/test_blocks.py"),
    Mutant("a published block is written", "kv/blocks.py", "self._counts[block] == 1 and block not in self._contents", "self._counts[block] == 1", PREFIXES),
    Mutant("an allocated block is still found", "kv/blocks.py", "            self._withdraw(block)\n            self._free", "            self._free", PREFIXES),
    Mutant("a prefix of another salt is found", "prefix_cache.py", "text = self._texts[sequence.id] = _Text(root,", "text = self._texts[sequence.id] = _Text(b'',", PREFIXES),
    Mutant("a prefix found by its last block alone", "prefix_cache.py", "before = self.blocks[-1][0] if self.blocks else self.root", "before = self.root", PREFIXES),
    Mutant("blocks published before they are known", "prefix_cache.py", "len(tokens) - c.reads_next)", "len(tokens) + 1)", PREFIXES),
    Mutant("a head keeps the state before another token", "prefix_cache.py", "lacks_last = not is_same and", "lacks_last = False and", PREFIXES),
    Mutant("a head's last state is not made anew", "drafters/heads.py", "if not (cached == start - 1 and cache.tables.resumes(sequence.id)):", "if True:", f"{HITS}[autoregressive-0.0-2048]"),
    Mutant("features of another block", "kv/cache.py", "self.boundaries[targets[is_last] // self.block_size] =", "self.boundaries[sources[is_last] // self.block_size] =", f"{HITS}[autoregressive-0.0-2048]"),
    Mutant("no copy before writing", "kv/blocks.py", "            self._unshare(table, index)", "            pass", "tests/kv/test_blocks.py"),
    Mutant("copy is not carried out", "kv/cache.py", "scatter_slots(storage, targets, gather", "scatter_slots(storage, sources, gather", "tests/kv/test_blocks.py"),
    Mutant("commit keeps every block", "kv/blocks.py", "        self._shorten(table, keep)\n", "        self._shorten(table, table.num_blocks)\n", "tests/kv/test_blocks.py"),
    Mutant("an interrupt gives a block back twice", "kv/blocks.py", "            table.num_blocks -= 1  # before its block goes: who is interrupted gives none back twice\n            self.pool.release(int(self._table[table.line, table.num_blocks]))\n", "            self.pool.release(int(self._table[table.line, table.num_blocks - 1]))\n            table.num_blocks -= 1\n", "tests/kv/test_blocks.py"),
    Mutant("samples that wait for their prompt hold up the queue", "scheduler.py", "                held.append(self.waiting.popleft())\n                continue\n", "                break\n", "tests/core/test_scheduler.py::test_a_prompt_that_is_read_holds_up_no_other_request"),
    Mutant("the whole time of a step is its tokens'", "step_costs.py", "max((step.seconds - seconds) / (step.tokens - tokens), 0.0)", "step.seconds / step.tokens", "tests/core/test_step_costs.py"),
    Mutant("a piece is as long beside many rows as beside one", "step_costs.py", "fed = num_decoding * self.row_tokens", "fed = self.decoding.tokens", "tests/core/test_step_costs.py"),
    Mutant("samples that wait for their prompt halve its reading", "scheduler.py", "islice(sequences, num_places) if not self._waits_for_prompt(s))", "islice(sequences, num_places))", "tests/core/test_scheduler.py"),
    Mutant("samples that wait for their prompt are overtaken", "scheduler.py", "len(self.running) - len(held)\n", "len(self.running)\n", "tests/core/test_scheduler.py::test_samples_that_wait_for_their_prompt_are_not_overtaken"),
    Mutant("a head's rows are all read at the last moment", "drafters/heads.py", "least = MOST_UNREAD - len(waiting) // at_once", "least = MOST_UNREAD", "tests/drafters/test_head_reading.py"),
    Mutant("a failed pass of a head loses what it had to read", "drafters/heads.py", "(unread := self._unread.get(number)) is not None", "(unread := self._unread.pop(number, None)) is not None", "tests/drafters/test_head_reading.py"),
    Mutant("all rows of a head are read in one step", "drafters/heads.py", "key=lambda n: -counts[n])[:at_once]", "key=lambda n: -counts[n])", "tests/drafters/test_head_reading.py"),
    Mutant("SiLU of heads as the framework has it", "model/load/loading.py", "    patch_sensitive(head)\n", "", "tests/model/test_vectors.py"),
    Mutant("zeros that a checkpoint lacks", "model/load/published.py", "for role in scheme.also_needs:", "for role in ():", "tests/model/test_published.py"),
    Mutant("room of unread tokens is given back", "kv/blocks.py", "-(-max(num_cached, num_held) //", "-(-num_cached //", "tests/kv/test_blocks.py"),
    Mutant("rows that rest reserve for drafts", "scheduler.py", "if self._may_draft and not self._is_short else 0", "if not self._is_short else 0", "tests/promises/test_adaptive.py::test_rows_that_rest_take_no_blocks_for_drafts[ngram]"),
    Mutant("draft past the limit", "scheduler.py", "sequence.num_tokens_left - num_pending - 1, *rooms))", "99, *rooms))", "tests/core/test_scheduler.py"),
    Mutant("admit what does not fit", "row_blocks.py", "row.sequence.id, row.longest + row.max_draft_tokens\n", "row.sequence.id, row.longest\n", f"{LOSSLESS}[1-always_right-3-greedy]"),
    Mutant("preempted rows keep their blocks", "scheduler.py", "        sequence = self.running.pop()\n        self.blocks.release(sequence)\n", "        sequence = self.running.pop()\n", "tests/promises/test_lossless.py::test_preemption_changes_no_token[ngram]"),
    Mutant("waiting samples hold shared blocks", "scheduler.py", "            self.blocks.refuse(sequence)\n", "", "tests/core/test_scheduler.py"),
    Mutant("a row that entered without it leaves a hole in what is kept", "row_blocks.py", "self.prefix_cache.begins_anew(sequence)\n", "pass\n", "tests/core/test_prefix_cache.py::test_a_text_that_fills_the_pool_enters_whatever_is_kept"),
    Mutant("the last token of a prompt's piece waits to be read", "drafters/heads.py", "row.num_new > 1 or not row.is_sampled", "row.num_new > 1", "tests/promises/test_heads_lossless.py::test_samples_of_one_prompt_share_what_the_head_read[autoregressive-chain-in pieces]"),
    Mutant("experts' own gates round by the batch", "model/patches/experts.py", "with WholeVectors() if full", "with nullcontext() if full", "tests/model/test_vectors.py::test_a_row_of_experts_with_a_gate_of_their_own_has_its_bits_among_many"),
    Mutant("a drafter hears again while blocks are reserved", "drafters/guard.py", "        start = self._clock()\n        if self._is_deaf or start", "        start = self._clock()\n        if self._is_deaf and start >= self._resumes_at:\n            self._hear_again()\n        if self._is_deaf or start", "tests/promises/test_drafter_wall.py::test_a_draft_model_left_out_for_hearing_slowly_drafts_again"),
    Mutant("padded rows enter that outgrow the pool", "build.py", "min(config.num_rows_held, storage.most_rows or config.num_rows_held)", "config.num_rows_held", "tests/baselines/test_padded_blocks.py::test_rows_wait_for_all_the_blocks_that_they_may_take"),
    Mutant("other engines' hidden states are read", "model/hidden_states.py", "            if get_ident() == here:\n                states[name] = _first(output)", "            if True:\n                states[name] = _first(output)", "tests/model/test_hidden_states.py::test_another_thread_that_runs_the_model_is_not_read"),
    Mutant("tokens after the end", "sequence.py", "            if self.is_finished:\n                return\n", "            if self.is_finished and i == len(kept.accepted):\n                return\n", "tests/promises/test_lossless.py::test_stop_tokens_inside_an_accepted_block[greedy]"),
    Mutant("positions drift", "model/pack.py", "np.repeat(starts - indptr[:-1], counts)", "np.repeat(starts - indptr[:-1] + (counts > 4), counts)", "tests/promises/test_invariance.py::test_logits_equal_the_framework"),
    Mutant("a query sees one key too many", "ops/reference_attention.py", "visible = keys <= positions[..., None]", "visible = keys <= positions[..., None] + 1", "tests/ops/test_attention.py"),
    Mutant("stale values are multiplied", "ops/reference_attention.py", "torch.where(tile.exists, gather_slots(values, tile.slots).transpose(1, 2), 0.0)", "gather_slots(values, tile.slots).transpose(1, 2)", "tests/ops/test_attention.py"),
    Mutant("linear calls of any size", "ops/reference.py", "    missing = -num_rows % ROWS_PER_CALL\n", "    return F.linear(x, weight, bias)\n    missing = 0\n", "tests/ops/test_linear.py::test_the_fallback_is_invariant_too"),
    Mutant("drafts past the draft model's context", "scheduler.py", "drafts.longest_text - len(sequence) + 1)", "drafts.longest_text - len(sequence) + 30)", "tests/promises/test_decoders.py::test_a_row_goes_on_without_a_draft_past_the_draft_models_context[37]"),
    Mutant("an accepted path stays where it was drafted", "model/runner.py", "if first < len(path):", "if False:", f"{LOSSLESS}[1-random_tree-3-greedy]"),
    Mutant("an accepted path moves to the wrong place", "model/runner.py", "num_known + first)", "num_known + first + 1)", f"{LOSSLESS}[1-random_tree-3-greedy]"),
    Mutant("copies are made out of order", "kv/cache.py", "written.isdisjoint(np.concatenate(copies[count]).tolist())", "True", "tests/kv/test_blocks.py"),
    Mutant("nodes of a tree stand in a row", "model/pack.py", "depths = node_depths(nodes)[len(nodes)", "depths = list(range(len(nodes)))[len(nodes)", f"{LOSSLESS}[1-random_tree-3-greedy]"),
    Mutant("a tree outgrows the row", "scheduler.py", "max(0, self.blocks.capacity - (", "max(0, self.blocks.capacity - 0 * (", "tests/core/test_scheduler.py"),
    Mutant("a step straddles the original context", "scheduler.py", "rooms = [switch - len(sequence) for switch", "rooms = [99 for switch", "tests/promises/test_decoders.py::test_greedy_speculation_equals_transformers[phi3-longrope-draft_model]"),
    Mutant("keys of the shorter context stay", "row_blocks.py", "tables.commit(sequence.id, 0)", "pass", "tests/promises/test_decoders.py::test_greedy_speculation_equals_transformers[phi3-longrope-ngram]"),
    Mutant("a head reads the features of the token before", "drafters/heads.py", "(first + row.num_new + node for", "(first + row.num_new - 1 + node for", "tests/promises/test_heads_lossless.py::test_a_drafted_nodes_state_is_that_of_its_path_alone[chain]"),
    Mutant("a head reads the features of its neighbour", "drafters/heads.py", "[row.num_new + kept.num_draft_tokens for", "[row.num_new for", "tests/promises/test_heads_lossless.py::test_a_drafted_nodes_state_is_that_of_its_path_alone[chain]"),
    Mutant("drafted keys of a head stay among those of the text", "drafters/frontier.py", "start = text_len + len(parents)", "start = text_len + len(parents) - 1", f"{HEADS}_change_no_token[autoregressive-chain-greedy-3]"),
    Mutant("what a head has read is not forked", "row_blocks.py", "        for tables in self.tables:\n            if parent.id in tables", "        for tables in self.tables[:1]:\n            if parent.id in tables", "tests/promises/test_heads_lossless.py::test_samples_of_one_prompt_share_what_the_head_read[autoregressive-chain-whole]"),
    Mutant("a head goes on over a gap", "drafters/heads.py", "if unread.end != row.start:", "if unread.end < 0:", "tests/promises/test_heads_lossless.py::test_after_a_fault_rows_go_on_and_are_drafted_for_once_read_anew[autoregressive]"),
    Mutant("nodes of a head's tree see their siblings", "drafters/frontier.py", "else list(parents)", "else None", "tests/promises/test_heads_lossless.py::test_a_drafted_nodes_state_is_that_of_its_path_alone[dynamic]"),
    Mutant("a draft model's tree stays in its cache", "drafters/draft_model.py", "len(kept.path) if self.growth is None else 0", "len(kept.path)", "tests/promises/test_draft_trees.py::test_a_node_has_the_logits_of_its_path_alone[static]"),
    Mutant("a node's logits are its parent's", "drafters/draft_model.py", "return np.arange(len(nodes))", "return np.maximum(np.arange(len(nodes)) - 1, 0)", "tests/promises/test_draft_trees.py::test_a_node_has_the_logits_of_its_path_alone[dynamic]"),
    Mutant("a greedy tree as of a draw", "drafters/frontier.py", "width, growth.only_ranks, sharpness)", "width, growth.only_ranks)", "tests/drafters/test_frontier.py"),
    Mutant("the same where logits change", "drafters/frontier.py", "width, sharpness=sharpness)", "width)", "tests/drafters/test_frontier.py"),
    Mutant("a tree of Medusa's heads is sharpened", "methods.py", "eagle2(1.0)", "eagle2(SHARPNESS)", "tests/drafters/test_frontier.py"),
    Mutant("unlikely paths are drafted", "trees.py", "joint[joint < forest.min_score]", "joint[joint < -np.inf]", "tests/drafters/test_confidence.py"),
    Mutant("confidence in the last token alone", "drafters/draft_model.py", "sum(c.scores) >= self._min_score", "c.scores[-1] >= self._min_score", "tests/drafters/test_confidence.py::test_a_chain_ends_where_the_definition_says"),
    Mutant("blocks of a step in flight given back", "engine.py", "row.sequence.id in pending and kept.next_token >= 0)", "False)", f"{AHEAD}::test_a_step_starts_where_the_one_in_flight_will_end"),
    Mutant("a row in flight is longer than it may be", "scheduler.py", "(1, row.max_draft_tokens + 1)", "(1, row.max_draft_tokens)", f"{AHEAD}::test_a_step_starts_where_the_one_in_flight_will_end"),
    Mutant("a plan for the longest text alone", "model/graphs/ahead.py", "slack.astype(np.int32)) for", "0 * slack.astype(np.int32)) for", f"{AHEAD}::test_a_plan_holds_all_that_any_length_sees"),
    Mutant("attention reads beyond the text", "ops/triton/attention.py", "    end_key = tl.minimum(end_key, tl.max(position) + 1)", "    end_key = end_key", f"{AHEAD}::test_a_plan_for_longer_texts_gives_the_same_bits"),
    Mutant("splits beyond the text are merged", "ops/triton/attention.py", "tl.minimum(end, position // split + 1)", "end", f"{AHEAD}::test_a_plan_for_longer_texts_gives_the_same_bits"),
    Mutant("splits before the window are merged", "ops/triton/attention.py", "range(tl.maximum(first, (position - window + 1) // split),", "range(first,", f"{AHEAD}::test_a_plan_for_longer_texts_gives_the_same_bits"),
    Mutant("the first split of K is forgotten", "ops/triton/linear.py", "number in range(num_splits)", "number in range(1, num_splits)", f"{BLOCKS}[torch.float32]"),
    Mutant("blocks stay counted", "ops/triton/linear.py", "            tl.store(arrived + block, 0)\n", "", f"{BLOCKS}[torch.float32]"),
    Mutant("what has gone lands all the same", "engine.py", "            step.plan.gone.add(sequence.id)\n", "            pass\n", f"{AHEAD}::test_a_row_may_go_and_come_back_in_flight"),
    Mutant("a place without a token is kept", "model/graphs/ahead.py", "len(kept.path) - (kept.next_token < 0)", "len(kept.path)", f"{AHEAD}::test_a_place_without_a_token_ends_the_row_as_in_plain_decoding"),
    Mutant("the draft model lacks a token", "model/graphs/ahead.py", "new = 1 if depth else KNOWN", "new = 1", f"{AHEAD}::test_drafts_are_those_of_a_draft_model_that_is_asked"),
    Mutant("a short draft is read to the length of others", "model/graphs/ahead.py", " & (at[:-1] < counts[:, None])", "", f"{AHEAD}::test_rows_draft_as_much_as_they_ask_for"),
    Mutant("no token equals no token", "model/graphs/ahead.py", " & (drafted >= 0)", "", f"{AHEAD}::test_a_place_without_a_token_ends_the_row_as_in_plain_decoding"),
    Mutant("the host does not wait", "model/graphs/ahead.py", "        self.event.synchronize()\n", "", f"{AHEAD}::test_a_step_starts_where_the_one_in_flight_will_end"),
    Mutant("texts outgrow the context in flight", "scheduler.py", "is_in_draft and end <= row.sequence.max_len", "is_in_draft", "tests/model/test_ahead_books.py::test_no_text_outgrows_the_context_in_flight"),
    Mutant("blocks for two steps are not counted", "scheduler.py", "            if self.blocks.reserve(row):", "            if pending or self.blocks.reserve(row):", f"{AHEAD}::test_where_blocks_are_lacking_rows_wait"),
    Mutant("rows under way run twice", "scheduler.py", "frozenset(row for plan in in_flight for row in plan.pending)", "frozenset()", BOOKS_OF_LANES),
    Mutant("rows under way are preempted", "scheduler.py", "            if self._under_way:\n                self._is_blocked = True\n                return 0\n", "", BOOKS_OF_LANES),
    Mutant("a lack of blocks outlives its step", "scheduler.py", "frozenset(), self._max_num_seqs, False", "frozenset(), self._max_num_seqs, self._is_blocked", BOOKS_OF_LANES),
    Mutant("a step of all rows knows of none under way", "scheduler.py", "for other in in_flight for", "for other in () for", BOOKS_OF_LANES),
    Mutant("states of rows that have left", "engine.py", "len(rows) < len(self.plan.rows)", "not rows", f"{LANES}::test_rows_that_leave_while_they_are_under_way"),
    Mutant(
        "what was not verified counts as wrong",
        "adaptive/hindsight.py",
        "(self.is_open * self.share)[:, None]",
        "(0.0 * self.share)[:, None]",
        "tests/adaptive/test_controller.py::test_what_single_lengths_would_have_emitted_counts_known_tokens_and_expects_unknown_ones",
    ),
    Mutant(
        "rows that were not asked have a draft each",
        "adaptive/hindsight.py",
        "(self.is_open * self.share)[:, None]",
        "self.is_open[:, None]",
        "tests/adaptive/test_controller.py::test_what_single_lengths_would_have_emitted_counts_known_tokens_and_expects_unknown_ones",
    ),
    Mutant(
        "rows without a match cost a single length",
        "adaptive/controller.py",
        "np.where(lengths < limits, lengths, LONGEST)",
        "np.where(lengths < limits, LONGEST, LONGEST)",
        "tests/adaptive/test_controller.py::test_rows_without_a_match_cost_a_single_length_nothing",
    ),
    Mutant(
        "what was not verified is as likely as any",
        "adaptive/controller.py",
        "            chances[rows, depths] = own\n",
        "",
        "tests/adaptive/test_controller.py::test_a_token_that_was_not_verified_is_expected_by_its_own_chance",
    ),
    Mutant("a probe takes the first token", "adaptive/controller.py", "is_admitted[survival.argmax()] = True", "is_admitted[0] = True", "tests/adaptive/test_controller.py::test_a_probe_takes_the_likeliest_of_all_that_can_be_copied"),
    Mutant("probes cost what they may", "adaptive/controller.py", "dearer / PROBED", "0.0 * dearer", "tests/adaptive/test_controller.py::test_probes_take_little_time"),
    Mutant("a decision stands as long however short steps are", "adaptive/standing.py", "max(deciding_ms / (DECIDED * step_ms), least)", "least", "tests/adaptive/test_controller.py::test_a_decision_stands_for_as_long_as_makes_it_cheap"),
    Mutant("plain steps go on in a smaller batch", "adaptive/standing.py", "num_rows >= num_before if", "True if", "tests/adaptive/test_controller.py::test_steps_that_rested_count_although_rows_change"),
    Mutant("a step without drafts goes ahead", "scheduler.py", "not plan.preempted and not self._is_short", "not plan.preempted", "tests/model/test_ahead_books.py::test_a_step_without_drafts_for_lack_of_blocks_is_the_hosts"),
    Mutant("samples lack the logprobs of their prompt", "sequence.py", "self.parent is None and self.params", "self.params", "tests/core/test_scheduler.py::test_samples_of_one_prompt_leave_its_logprobs_to_the_first"),
    Mutant("a slow proposal ends deafness", "drafters/guard.py", "self._is_deaf |= is_hearing", "self._is_deaf = is_hearing", "tests/promises/test_drafter_wall.py::test_one_that_is_deaf_stays_so_when_another_proposal_was_slow"),
    Mutant("pieces decide whether the first token is drafted", "build.py", "max_depth), spec.acceptance == \"exact\"", "max_depth), True", "tests/promises/test_prefix_hits.py::test_under_typical_acceptance_the_pieces_of_a_prompt_change_no_text"),
    Mutant("a bad place ends paths that avoid it", "acceptance.py", "    except Exception:\n        return None\n", "    except ZeroDivisionError:\n        return None\n", "tests/core/test_acceptance.py::test_a_place_without_probabilities_ends_the_paths_that_come_to_it"),
    Mutant("the server ignores the model's own parameters", "server/protocol.py", "{**defaults, **given}", "given", "tests/server/test_server.py::test_requests_without_parameters_have_those_of_the_model"),
    Mutant("a plain step of other rows is measured", "adaptive/controller.py", "self._standing.passes() or not self._are_priced", "self._standing.passes()", "tests/adaptive/test_controller.py::test_a_plain_step_of_other_rows_than_were_decided_on_teaches_nothing"),
    Mutant("hopes stand for several steps", "adaptive/controller.py", "(is_plain or self._num_learned >= KNOWN)", "True", "tests/adaptive/test_controller.py::test_drafts_stay_short_until_chances_are_believed_however_dear_deciding_is"),
    Mutant("all plain steps are learned from", "adaptive/standing.py", "max(HELD, num_steps // HELD)", "HELD", "tests/adaptive/test_controller.py::test_a_decision_stands_for_as_long_as_makes_it_cheap"),
    Mutant("who has decided on other rows learns", "adaptive/lanes.py", "if step[0] == numbers", "if step[0]", f"{LANES}::test_lanes_change_no_token"),
    Mutant("states of another plan are taken", "parallel/handover.py", " != plan_hash or not has_room", " < 0 or not has_room", "tests/parallel/test_handover.py"),
    Mutant("a plan's past is not compared", "parallel/pass_plan.py", "if (mark, form, number, before) != (MARK, FORMAT, self.number + 1, self.hash)", "if (mark, form, number) != (MARK, FORMAT, self.number + 1)", f"{PASS_PLAN}::test_another_past_is_refused"),
    Mutant("a plan's size is not compared", "parallel/pass_plan.py", "if num_bytes != said", "if num_bytes < 0", f"{PASS_PLAN}::test_a_plan_of_another_size_than_its_header_says_is_refused"),
    Mutant("plans of other counts share memory", "parallel/pass_plan.py", "self._kept.get((has_trees, *counts))", "self._kept.get((has_trees, *counts[:-1], 0))", f"{PASS_PLAN}::test_plans_of_equal_counts_share_memory_and_nothing_else"),
    Mutant("a worker's message may end early", "parallel/serving.py", "if end == count else b\"\"", "", "tests/parallel/test_socket_way.py"),
    Mutant("a match is counted past its end", "drafters/ngram.py", "tokens[place - 1 - length] == tokens[-1 - length]", "tokens[-1 - length] >= 0", "tests/drafters/test_ngram.py"),
    Mutant("a drafter that rested has no time to read", "drafters/guard.py", "or (self._reads and not row.max_draft_tokens)", "", "tests/promises/test_drafter_wall.py::test_a_text_that_grew_while_nothing_was_asked_for_may_be_read_at_once"),
    Mutant("a wait of one row is another's time", "drafters/guard.py", "for row in rows if row.max_draft_tokens or row.num_new > 1", "for row in rows", "tests/promises/test_drafter_wall.py::test_a_text_that_grew_while_nothing_was_asked_for_may_be_read_at_once"),
    Mutant("norms start as their weights", "heads/parts.py", "return 1.0 + weight if", "return weight if", "tests/heads/test_heads.py::test_norms_start_as_what_the_targets_multiply_by"),
    Mutant("a converted matrix loses its values", "model/patches/weights.py", "original = None if self.original is None else", "original = None if True else", "tests/model/test_recognised.py::test_a_matrix_that_is_no_linear_layers_keeps_its_values_in_another_dtype"),
    Mutant("a stale state of a head", "drafters/heads.py", "self._states[span.row] = (span.text_len + 1, state)", "self._states.setdefault(span.row, (0, state)); self._states[span.row] = (span.text_len + 1, self._states[span.row][1])", "tests/promises/test_heads_lossless.py::test_after_a_fault_rows_go_on_and_are_drafted_for_once_read_anew"),
    Mutant("costs of a drafter in other bits serve", "adaptive/cost_files.py", '"drafter_quantization": str(quantization), ', "", "tests/memory/test_step_speeds.py"),
    Mutant("prefixes come back before drafts", "memory/ladder.py", "(prefixes, self.spec), (self.config, spec), (prefixes, spec)", "(self.config, spec), (prefixes, self.spec), (prefixes, spec)", "tests/memory/test_ladder.py"),
    Mutant("costs of other settings serve", "memory/step_speeds.py", "wanted.items() <= record.key.items()", "True", "tests/memory/test_step_speeds.py"),
]  # fmt: skip


def stale() -> list[str]:
    """Names of mutants whose patch does not apply exactly once."""
    return [m.name for m in MUTANTS if (ROOT / "src/echelon" / m.file).read_text("utf-8").count(m.old) != 1]


def survives(mutant: Mutant, folder: Path, passes: Callable[[str], bool]) -> bool:
    """Whether the killer passes on the sources in `folder` with the fault in place, which is taken out again."""
    path = folder / mutant.file
    original = path.read_text("utf-8")
    path.write_text(original.replace(mutant.old, mutant.new), "utf-8")
    try:
        return passes(mutant.killer)
    finally:
        path.write_text(original, "utf-8")


@dataclass(frozen=True)
class Copy:
    """A copy of the package in `folder`, which tests are run against."""

    folder: Path

    def passes(self, killer: str) -> bool:
        """Whether a test passes on the copy as it is."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", killer]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(self.folder)}, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.returncode == 0

    def survives(self, mutant: Mutant) -> bool:
        """Whether the killer passes all the same with the fault in place."""
        return survives(mutant, self.folder / "echelon", self.passes)


def verdicts(chosen: list[Mutant], copy: Copy) -> dict[str, str]:
    """Name → "killed", "SURVIVED", or "NO CONTROL" where the killer fails without the fault too and so shows nothing."""
    control, found = cache(copy.passes), {}
    for mutant in chosen:
        found[mutant.name] = "NO CONTROL" if not control(mutant.killer) else "SURVIVED" if copy.survives(mutant) else "killed"
        print(f"{found[mutant.name]:10}  {mutant.name}  ({mutant.killer})", flush=True)
    return found


def main(names: list[str]) -> int:
    if stale():
        print("patches that no longer apply:", *stale(), sep="\n  ")
        return 1
    if unknown := set(names) - {m.name for m in MUTANTS}:
        print("no such mutants:", *sorted(unknown), sep="\n  ")
        return 1
    chosen = [m for m in MUTANTS if not names or m.name in names]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(ROOT / "src/echelon", folder / "echelon", ignore=shutil.ignore_patterns("pair", "__pycache__"))
        (folder / "echelon/demo/pair").symlink_to(ROOT / "src/echelon/demo/pair")
        found = verdicts(chosen, Copy(folder))
    num_killed = sum(verdict == "killed" for verdict in found.values())
    print(f"{num_killed} of {len(chosen)} killed")
    return 0 if num_killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
