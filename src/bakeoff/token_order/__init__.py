"""Orders of the tokens of images, volumes and point clouds, in which neighbours share a segment."""

from bakeoff.token_order.order import TokenOrder, permute, token_order
from bakeoff.token_order.report import Halo, OrderReport

__all__ = ["Halo", "OrderReport", "TokenOrder", "permute", "token_order"]
