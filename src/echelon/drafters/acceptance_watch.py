"""While it runs: does the target accept anything of what is drafted? Where it does not, drafting costs time for nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from echelon.stats import Stats, StepRecord

logger = logging.getLogger("echelon")
NUM_DRAFTS = 1000  # drafts of a row that are judged together
LEAST_ACCEPTED = 0.05  # tokens a draft


@dataclass
class AcceptanceWatch:
    """Warns once, where of NUM_DRAFTS drafts in a row fewer than LEAST_ACCEPTED tokens each were accepted.

    method  what drafts
    stats   counters of the run, which have counted a step before it is observed here
    judged  drafts and accepted tokens that have been judged already
    """

    method: str
    stats: Stats
    judged: tuple[int, int] = (0, 0)
    has_warned: bool = False

    def observe(self, record: StepRecord) -> None:  # noqa: ARG002
        """Judge what has been drafted since the last time, once it is enough."""
        drafts, accepted = self.stats.num_row_steps - self.stats.acceptance[0, 0], self.stats.num_accepted_tokens
        if self.has_warned or drafts - self.judged[0] < NUM_DRAFTS:
            return
        count, accepted = drafts - self.judged[0], accepted - self.judged[1]
        self.judged = drafts, self.stats.num_accepted_tokens
        if accepted < LEAST_ACCEPTED * count:
            self.has_warned = True
            logger.warning(
                "of the last %d drafts by method %r only %d tokens were accepted: the output stays right, and drafting costs time for "
                "nothing. `echelon drafters MODEL --input PROMPTS` says which drafter pays on your prompts",
                count,
                self.method,
                accepted,
            )
