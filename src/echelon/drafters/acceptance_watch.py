"""While it runs: does the target accept anything of what is drafted? Where it does not, drafting costs time for nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from echelon.stats import StepRecord

logger = logging.getLogger("echelon")
NUM_DRAFTS = 1000  # drafts of a row that are judged together
LEAST_ACCEPTED = 0.05  # tokens a draft


@dataclass
class AcceptanceWatch:
    """Warns once, where of NUM_DRAFTS drafts in a row fewer than LEAST_ACCEPTED tokens each were accepted. `method`: what drafts."""

    method: str
    num_drafts: int = 0
    num_accepted: int = 0
    has_warned: bool = False

    def observe(self, record: StepRecord) -> None:
        """Count the drafts of a settled step."""
        if self.has_warned:
            return
        for kept in record.verdict:
            if kept.num_draft_tokens:
                self.num_drafts += 1
                self.num_accepted += len(kept.path)
        if self.num_drafts >= NUM_DRAFTS:
            self._judge()

    def _judge(self) -> None:
        accepted, count = self.num_accepted, self.num_drafts
        self.num_drafts = self.num_accepted = 0
        if accepted < LEAST_ACCEPTED * count:
            self.has_warned = True
            logger.warning(
                "of the last %d drafts by method %r only %d tokens were accepted: the output stays right, and drafting costs time for "
                "nothing. `echelon drafters MODEL --input PROMPTS` says which drafter pays on your prompts",
                count,
                self.method,
                accepted,
            )
