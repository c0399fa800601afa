"""The Routing lab: one small batch, routed and balanced by moe_core, with every number in between."""
