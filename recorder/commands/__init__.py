"""The subcommands of `routescope`, put together in `recorder.cli`."""
