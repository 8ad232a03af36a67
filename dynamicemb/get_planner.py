"""Documented import path of `get_planner`."""

from dynamicemb.sharding.planning.get_planner import get_planner

__all__ = ["get_planner"]
