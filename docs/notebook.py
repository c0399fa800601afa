"""A notebook on the sample runs, as a script: each `# %%` is a cell in VS Code, Jupytext and Spyder.

Run it from the repository's root: `python docs/notebook.py`.
"""

# %% Open the runs
from moe_core.metrics import slowest_rank_cost
from moe_core.placement import balanced_placement, contiguous_placement
from recorder import Run

collapsed, balanced = Run("sample_runs/none"), Run("sample_runs/top2-shared")
print(collapsed)
print(balanced)

# %% Is the load balanced? A column for each MoE layer, a row for each step
violation = collapsed.metric("max_violation", window=50)
print(violation.iloc[[49, 199, 399]].round(2))
print(f"max violation is in: {violation.attrs['unit']}")

# %% When does routing settle? Overlap of each probe's choices with the final ones, and what changed since the last
print(balanced.saturation().round(2).tail(5))
print(balanced.churn(layer=3).round(2).tail(3))

# %% Which tokens moved last?
last = balanced.last_fluctuation(layer=3)
print(last.sort_values("last_fluctuation", na_position="first").tail(3))

# %% Do experts specialise? Share of a domain's tokens that use each expert
domains = balanced.domain_specialisation(layer=3)
print(domains.round(2))
print(f"without specialisation: {domains.attrs['baseline']:.2f}")

# %% ... and on which tokens?
words = balanced.vocabulary(layer=3, min_occurrences=50).dropna(subset="share")
print(words.nlargest(5, "share")[["text", "occurrences", "main_expert", "share"]])

# %% Which experts fire together, and where does a token go next?
print(balanced.coactivation(layer=3).round(2))
print(balanced.transitions(layer=1).round(2))

# %% Does an expert keep a whole stretch of text? Against what chance alone would give
print(balanced.repeat_rate().round(3))

# %% What would this load cost on 4 devices? 1.00 = as fast as a perfect split
load = collapsed.load(layer=3).sum(axis=0)
for name, placement in {
    "experts in order": contiguous_placement(len(load), num_ranks=4),
    "a plan": balanced_placement(load, num_ranks=4),
    "a plan with 4 spare replicas": balanced_placement(load, num_ranks=4, spare_replicas=4),
}.items():
    print(f"{name}: {slowest_rank_cost(placement.rank_loads(load)):.2f}")
