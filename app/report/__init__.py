"""One or several runs as one page of HTML that opens offline: what `routescope report` writes."""
