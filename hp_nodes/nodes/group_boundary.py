"""Group boundary: an error that only a balancing group knows of becomes this rank's error towards all data ranks.

Takes windows, gives the same ones. Below it a group of ranks plans and exchanges samples among itself, and raises one
error on all its ranks; the other groups hear of it at the closing exchange, for which the error has to be told again.
Keeps nothing.
"""

from __future__ import annotations

from torchdata.nodes import BaseNode

from hp_nodes.errors import DataPlaneError
from hp_nodes.nodes.stage import Stage
from hp_nodes.transport import Transport
from hp_nodes.types import Window

__all__ = ["GroupBoundary"]


class GroupBoundary(Stage[Window]):
    """The source's windows.

    Args:
        source: the topmost node that exchanges within the group.
        group: the group's transport, from :func:`hp_nodes.transport.balance_group.create_balance_group`.
    """

    def __init__(self, source: BaseNode[Window], group: Transport, *, name: str | None = None) -> None:
        super().__init__(source, name=name)
        self.group = group

    def next(self) -> Window:
        before = self.group.exchanges
        try:
            return self.give(self.pull())
        except DataPlaneError as error:
            # Without an exchange of the group it was all data ranks that agreed; after a lost one nothing can be told.
            if error.agreed and self.group.exchanges > before and not getattr(self.group, "lost", False):
                error.agreed = False
            raise
