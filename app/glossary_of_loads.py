"""Words of the glossary: what loads say, as `moe_core.metrics_of_loads` computes it."""

from app.glossary_entry import Entry

WANG = "Wang et al. 2408.15664"

ENTRIES = (
    Entry(
        key="load",
        name="Load",
        meaning="The assignments each expert gets: one for every token and slot that chose it. Counted before "
        "capacity drops any, so that dropping cannot hide a collapse.",
        formula="c_e = number of tokens that have e among their k experts",
        bound="0 to T for one expert; T k over all of them",
        example="two tokens that chose 0 and 1, 0 and 2, all loads: 2 + 1 + 1 + 0 = 4",
        see=("uniform_share", "load_ratio", "gate_mass"),
    ),
    Entry(
        key="uniform_share",
        name="Uniform share",
        meaning="The load that each expert would have if all had the same. Every picture of a load is drawn over "
        "it, so that layers with other numbers of experts compare.",
        formula="mean(c) = T k / E",
        bound="the same for all experts of a layer; 1/E of the assignments",
        source=f"the ideal load of {WANG}",
        example="loads 6, 1, 1, 0: (6 + 1 + 1 + 0) / 4 = 2",
        also=("ideal load",),
        see=("load_ratio",),
    ),
    Entry(
        key="load_ratio",
        name="Load / uniform share",
        meaning="How many times the uniform share an expert gets. White in the pictures is 1, red is more, blue "
        "less, and purple below 1/16: next to unused.",
        formula="c_e / mean(c)",
        bound="0 (never used) to E/k (every token uses it); 1 is balanced",
        source=WANG,
        example="loads 6, 1, 1, 0, expert 0: 6 / 2 = 3",
        see=("uniform_share", "max_violation"),
    ),
    Entry(
        key="max_violation",
        name="Max violation, batch",
        meaning="How far the busiest expert of a single step is above the uniform share. It keeps the sampling "
        "noise of the batch; a mean over steps is a mean of these values.",
        formula="max(c) / mean(c) - 1",
        bound="0 (balanced) to E/k - 1 (every token uses the busiest expert)",
        source=f"MaxVio, {WANG}",
        example="loads 6, 1, 1, 0: 6 / 2 - 1 = 2",
        also=("MaxVio", "max_violation, batch"),
        see=("max_violation_window", "max_violation_bound"),
    ),
    Entry(
        key="max_violation_window",
        name="Max violation, window",
        meaning="How far the busiest expert is above the uniform share, of the loads summed over a window of steps. "
        "Free of the noise of single batches, it shows what stays uneven.",
        formula="max(C) / mean(C) - 1, with C the sum of c over the window",
        bound="0 (balanced) to E/k - 1",
        source=f"global MaxVio, {WANG}",
        example="steps 3, 1 and 1, 3, summed: 4 / 4 - 1 = 0",
        also=("max_violation, window",),
        see=("max_violation", "window"),
    ),
    Entry(
        key="max_violation_bound",
        name="Most that max violation can be",
        meaning="Every token sends one of its k assignments to the same expert. Pages draw this line, since a value"
        " says little without it.",
        formula="E/k - 1",
        bound="0 (k = E) to E - 1 (k = 1)",
        source="follows from the definition, as a token's experts are distinct",
        example="8 experts, top-2: 8 / 2 - 1 = 3",
        see=("max_violation",),
    ),
    Entry(
        key="load_cv",
        name="Load CV",
        meaning="Coefficient of variation: the spread of the loads over their mean. Unlike max violation it hears "
        "of all experts, not only of the busiest.",
        formula="std(c) / mean(c), with the population's std",
        bound="0 (balanced) to sqrt(E/k - 1)",
        example="loads 3, 1: sqrt(((3 - 2)**2 + (1 - 2)**2) / 2) / 2 = 0.5",
        see=("max_violation", "gini"),
    ),
    Entry(
        key="load_entropy",
        name="Load entropy",
        meaning="Entropy of the shares of the load over the most it can be. It is about how often experts are used,"
        " not about how sure the router is: that is router entropy.",
        formula="-sum(f ln f) / ln E",
        bound="0 (one expert for all) to 1 (balanced); at least ln k / ln E",
        example="loads 2, 2, 0, 0: ln(2) / ln(4) = 0.5",
        see=("effective_experts", "router_entropy"),
    ),
    Entry(
        key="effective_experts",
        name="Effective experts",
        meaning="How many evenly used experts would have the same load entropy. A layer of 16 that reads 2 works "
        "like one of 2.",
        formula="exp(-sum(f ln f))",
        bound="k (all tokens choose the same k) to E (balanced)",
        example="loads 2, 2, 0, 0: exp(ln(2)) = 2",
        see=("load_entropy", "effective_share"),
    ),
    Entry(
        key="effective_share",
        name="Effective share",
        meaning="Where the number of effective experts lies between its least, k, and its most, E. The diagnosis "
        "calls a layer collapsed by it, since one hot expert among many used ones is no collapse.",
        formula="(exp(-sum(f ln f)) - k) / (E - k)",
        bound="0 (full collapse) to 1 (balanced)",
        example="loads 2, 2, 0, 0, top-1: (exp(ln(2)) - 1) / (4 - 1) = 0.333",
        see=("collapse", "effective_experts"),
    ),
    Entry(
        key="gini",
        name="Gini coefficient",
        meaning="Mean difference between the loads of two experts over twice the mean load. It is the measure of "
        "uneven incomes, here of work.",
        formula="sum over i, j of |c_i - c_j| / (2 E^2 mean(c))",
        bound="0 (balanced) to 1 - k/E (the same k experts for all)",
        example="loads 3, 1: (0 + 2 + 2 + 0) / (2 * 2**2 * 2) = 0.25",
        see=("load_cv",),
    ),
    Entry(
        key="min_load",
        name="Least load",
        meaning="Assignments of the least used expert. Zero over a whole window means a dead expert.",
        formula="min(c)",
        bound="0 to T k / E",
        example="loads 6, 1, 1, 0: 0 = 0",
        see=("dead_experts",),
    ),
    Entry(
        key="max_load",
        name="Greatest load",
        meaning="Assignments of the busiest expert. The others wait for it where each expert has a device of its own.",
        formula="max(c)",
        bound="T k / E to T",
        example="loads 6, 1, 1, 0: 6 = 6",
        see=("max_violation",),
    ),
    Entry(
        key="dead_experts",
        name="Dead experts",
        meaning="Experts without any assignment in a whole window. Their parameters are carried along and learn "
        "nothing.",
        formula="number of e with c_e = 0, c summed over the window",
        bound="0 to E - k",
        example="loads 6, 1, 1, 0: 1 = 1",
        also=("dead", "dead_ids"),
        see=("idle_experts", "window"),
    ),
    Entry(
        key="idle_experts",
        name="Idle experts",
        meaning="Experts that get less than a tenth of the uniform share in a whole window, dead ones included. Any"
        " other expert is called busy.",
        formula="number of e with c_e < 0.1 mean(c), c summed over the window",
        bound="0 to E - k, for k up to 10",
        example="loads 90, 7, 2, 1, below a tenth of 25: 1 + 1 = 2",
        also=("idle", "busy", "idle_ids"),
        see=("dead_experts", "uniform_share"),
    ),
    Entry(
        key="window",
        name="Window",
        meaning="The last recorded steps that a number is taken over, 50 unless chosen otherwise. Loads are summed "
        "over it before an expert is called idle or dead, since in one step it may be passed over by "
        "chance.",
        formula="C_e = sum of c_e over the steps of the window",
        bound="1 step to all recorded ones",
        example="expert 0 in steps 3, 1, 2, window of 2: 1 + 2 = 3",
        also=("steps", "window_load"),
        see=("max_violation_window",),
    ),
    Entry(
        key="collapse",
        name="Collapse",
        meaning="A layer sends nearly all tokens to a few experts. The diagnosis says so once the effective share "
        "of a window falls below 0.5, and takes it back above 0.75.",
        formula="effective share < 0.5",
        see=("effective_share", "balanced"),
    ),
    Entry(
        key="balanced",
        name="Balanced",
        meaning="All experts of a layer get about the same load. The diagnosis says so where max violation of the "
        "loads of every window is below 0.5 until the end.",
        formula="max_violation of the window < 0.5",
        see=("max_violation_window", "collapse"),
    ),
    Entry(
        key="capacity",
        name="Capacity",
        meaning="The most assignments an expert may take in a batch, where a limit is set. What comes beyond is "
        "dropped: the token passes through the residual, and still counts in the load.",
        formula="ceil(T k / E * capacity factor), at least 4 and at most T",
        bound="4 (or T, where that is less) to T",
        source="GShard 2006.16668; Switch Transformer 2101.03961",
        example="100 tokens, top-1 of 8, factor 1.25: ceil(100 * 1 / 8 * 1.25) = 16",
        also=("capacity_factor", "capacity factor"),
        see=("drop_rate",),
    ),
    Entry(
        key="drop_rate",
        name="Drop rate",
        meaning="Share of the assignments that capacity dropped. Dropped tokens got less computation than the model"
        " was meant to give them.",
        formula="dropped / (T k)",
        bound="0 (none) to 1; none to speak of without a capacity",
        example="12 of 400 assignments: 12 / 400 = 0.03",
        also=("dropped", "drops"),
        see=("capacity",),
    ),
    Entry(
        key="rank",
        name="Rank",
        meaning="A process of a distributed run, usually one device. Its load is the sum of the loads of the "
        "experts that stand on it.",
        formula="sum of c_e over the experts of the rank",
        bound="0 to T k",
        example="experts with loads 6 and 1 on one rank: 6 + 1 = 7",
        also=("device",),
        see=("slowest_rank_cost", "placement"),
    ),
    Entry(
        key="rank_balancedness",
        name="Balancedness",
        meaning="How well the experts' ranks share the work: mean over max of their loads in each layer, then the "
        "mean over layers. Never averaged over layers first, which would hide that each layer waits for its"
        " own slowest rank.",
        formula="mean over layers of mean(rank loads) / max(rank loads)",
        bound="1/R (one rank does all) to 1 (even)",
        source="balancedness as SGLang and vLLM log it",
        example="one layer, ranks with 6 and 2: 4 / 6 = 0.667",
        also=("balancedness",),
        see=("slowest_rank_cost",),
    ),
    Entry(
        key="slowest_rank_cost",
        name="Slowest rank / perfect split",
        meaning="How much longer the slowest rank takes than each would in a perfect split. All others wait for it "
        "in every layer.",
        formula="max(rank loads) / mean(rank loads)",
        bound="1 (a perfect split) to R (one rank does all)",
        example="ranks with 6 and 2: 6 / 4 = 1.5",
        see=("rank_balancedness", "placement"),
    ),
    Entry(
        key="placement",
        name="Placement",
        meaning="Which rank holds which expert. A plan puts experts together so that ranks are even, and may copy "
        "busy experts (replicas) into spare slots.",
        source="after the published description of DeepSeek's EPLB, 2412.19437",
        also=("replica", "replicas", "spare slots", "contiguous", "planned"),
        see=("slowest_rank_cost",),
    ),
)
