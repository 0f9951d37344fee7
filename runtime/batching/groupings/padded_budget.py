"""Token-budget groups: arrival order, in calls whose padded size (items × the longest) fits ``token_budget``.

So a call is a rectangle of bounded area: many short items or few long ones. Without padding (packed calls) the budget
bounds the sum instead, which is what plain arrival order does.
"""

from __future__ import annotations

from runtime.batching.groupings.arrival import ArrivalOrder


class TokenBudgetGroups(ArrivalOrder):
    """See the module."""

    padded = True
