"""Words of the glossary: what decisions say (`moe_core.metrics_of_decisions`), and the parts of a recorded run."""

from app.glossary_entry import Entry

OLMOE = "OLMoE, Muennighoff et al. 2409.02060"

ENTRIES = (
    Entry(
        key="assignment",
        name="Assignment",
        meaning="One token in one of its k slots: the smallest thing that is counted. A token has k of them in "
        "every MoE layer.",
        formula="T k in a layer and step",
        example="256 tokens, top-2: 256 * 2 = 512",
        also=("assignments", "slot"),
        see=("decision", "load"),
    ),
    Entry(
        key="decision",
        name="Decision",
        meaning="One token in one layer with its k experts, best first. Recorded every so many steps, since they "
        "are most of a run's size.",
        also=("decisions", "first choice", "decisions_every"),
        see=("assignment",),
    ),
    Entry(
        key="tokens",
        name="Tokens",
        meaning="Real tokens of a step, or those routed in a layer; padding never counts. A table of layers shows "
        "the mean of a step.",
        also=("token", "T"),
        see=("sequence",),
    ),
    Entry(
        key="sequence",
        name="Sequence",
        meaning="One row of a batch: tokens that belong together, with a position from 0 on. Pages show one or a "
        "few of a batch.",
        also=("position",),
        see=("tokens",),
    ),
    Entry(
        key="domain",
        name="Domain",
        meaning="The kind of text that a sequence comes from, such as code or arithmetic, as the run named it. "
        "Experts may take one domain rather than another.",
        also=("domains",),
        see=("domain_specialisation",),
    ),
    Entry(
        key="probe",
        name="Probe",
        meaning="One fixed batch that is never trained on, run in eval mode every so many steps; in toy runs after the "
        "step's update, so that the probe of step 0 sees a model that has learned once. Saturation and churn are "
        "measured on it, since they need the same tokens each time.",
        also=("probe_every", "probes"),
        see=("saturation", "churn"),
    ),
    Entry(
        key="overlap",
        name="Overlap",
        meaning="Of the experts a token had before, the share it has now, whatever their order. One token with half"
        " of them kept reads 0.5.",
        formula="|experts now and then| / k",
        bound="0 to 1; about k/E by chance",
        example="experts 0, 1 and then 1, 2: 1 / 2 = 0.5",
        see=("saturation", "churn"),
    ),
    Entry(
        key="saturation",
        name="Saturation",
        meaning="How much of its final routing a layer has found: the overlap with the experts of the last probe, "
        "mean over its tokens. The last probe agrees with itself, so its own 1 says nothing.",
        formula="mean over tokens of |experts now and at the last probe| / k",
        bound="0 to 1 (as at the end); about k/E by chance",
        source=f"{OLMOE}, section 5.1",
        example="two tokens, one kept and one changed: (1 + 0) / 2 = 0.5",
        see=("churn", "probe"),
    ),
    Entry(
        key="churn",
        name="Churn",
        meaning="How much the routing changed from one probe to the next. Churn that stays up means that the "
        "balancer or the learning rate still moves tokens about.",
        formula="1 - mean over tokens of |experts now and at the probe before| / k",
        bound="0 (nothing moved) to 1",
        source=f"1 - saturation ({OLMOE}) between neighbours in time",
        example="two tokens, one kept and one changed: 1 - (1 + 0) / 2 = 0.5",
        see=("saturation", "last_fluctuation"),
    ),
    Entry(
        key="last_fluctuation",
        name="Last fluctuation",
        meaning="The last probe at which a token's first choice was not its final one. Late ones are tokens that "
        "the router never made up its mind about.",
        formula="last probe with first choice != first choice at the end",
        bound="none (never another choice) to the last probe but one",
        source="StableMoE, Dai et al. 2204.08396, section 2",
        example="first choices 3, 5, 3, 3 at probes 0 to 3: 1 = 1",
        see=("churn",),
    ),
    Entry(
        key="coactivation",
        name="Co-activation",
        meaning="Of the tokens that chose one expert, the share that chose another one too. All pairs of a token's "
        "experts count, not only neighbours in rank.",
        formula="N_ab / N_a",
        bound="0 to 1; about (k - 1) / (E - 1) by chance",
        source=f"{OLMOE}, section 5.2, there over neighbouring pairs",
        example="2 tokens use expert 0, 1 of them expert 1 too: 1 / 2 = 0.5",
        also=("co-activation",),
        see=("transition",),
    ),
    Entry(
        key="transition",
        name="Transition",
        meaning="Of the choices of an expert in one layer, the share that goes on to each expert of the next MoE "
        "layer. Rows that look alike mean that the next layer does not care.",
        formula="tokens that chose a, then b / all such pairs of a",
        bound="0 to 1; a row sums to 1",
        example="expert 0 is followed 3 times by 0 and once by 1: 3 / (3 + 1) = 0.75",
        also=("transitions",),
        see=("coactivation",),
    ),
    Entry(
        key="domain_specialisation",
        name="Domain specialisation",
        meaning="Share of a domain's tokens that use an expert, over all recorded decisions. Without specialisation"
        " every one is k/E.",
        formula="tokens of the domain that use e / tokens of the domain",
        bound="0 to 1; a row sums to k",
        source=f"{OLMOE}, section 5.3",
        example="30 of 40 tokens of code: 30 / 40 = 0.75",
        also=("specialisation", "specialization"),
        see=("domain_baseline", "vocab_specialisation"),
    ),
    Entry(
        key="domain_baseline",
        name="Even use",
        meaning="The share of tokens that would use an expert if all were used alike. Domain specialisation is read"
        " against it.",
        formula="k/E",
        bound="1/E to 1",
        example="top-2 of 8: 2 / 8 = 0.25",
        also=("baseline",),
        see=("domain_specialisation",),
    ),
    Entry(
        key="vocab_specialisation",
        name="Token specialisation",
        meaning="Share of a token id's occurrences that use its main expert. Only ids seen at least 10 times count.",
        formula="max over e of (occurrences that use e) / occurrences",
        bound="k/E or more, to 1",
        source=f"{OLMOE}, section 5.4",
        example="9 of 12 occurrences use the main expert: 9 / 12 = 0.75",
        also=("vocabulary specialisation", "main expert"),
        see=("domain_specialisation",),
    ),
    Entry(
        key="repeat_rate",
        name="Repeat rate",
        meaning="How often a token's first choice is that of the token before it. High values mean that routing "
        "goes by runs of text rather than by single tokens.",
        formula="neighbours with the same first choice / neighbours",
        bound="0 to 1; compare with the chance of a repeat",
        source="Mixtral, Jiang et al. 2401.04088, section 5",
        example="first choices 1, 1, 2, 2: 2 / 3 = 0.667",
        see=("repeat_chance",),
    ),
    Entry(
        key="repeat_chance",
        name="Chance of a repeat",
        meaning="What the repeat rate would be if neighbours chose independently. More uneven loads make it greater.",
        formula="sum of squared shares of first choices",
        bound="1/E (even) to 1",
        source="Mixtral, Jiang et al. 2401.04088, section 5",
        example="first choices 3 and 1: (3 / 4)**2 + (1 / 4)**2 = 0.625",
        see=("repeat_rate",),
    ),
    Entry(
        key="run",
        name="Run",
        meaning="A folder with what was recorded of one training or generation: a manifest and Parquet tables. Its "
        "status is running, finished, cancelled, failed, or unfinished where its process ended without "
        "saying so.",
        also=("status", "run_id", "manifest", "unfinished"),
        see=("phase", "segment"),
    ),
    Entry(
        key="phase",
        name="Phase",
        meaning="What the model did in a step: train, probe, eval or generate. Numbers are of training steps "
        "wherever a run has any.",
        also=("train", "eval", "generate"),
        see=("probe", "step"),
    ),
    Entry(
        key="step",
        name="Step",
        meaning="One optimizer step, numbered from 0. Not every step need be recorded, and decisions less often "
        "than loads.",
        also=("last_step", "wall_time_s"),
        see=("window",),
    ),
    Entry(
        key="segment",
        name="Segment",
        meaning="What was recorded between two resumes of a run, from 0 on. Where steps were recorded twice, the "
        "later segment counts.",
        also=("resumed",),
        see=("run",),
    ),
    Entry(
        key="loss",
        name="Loss",
        meaning="What training minimises, auxiliary losses included. Compare runs by cross-entropy, since aux "
        "losses differ from recipe to recipe.",
        formula="ce_loss + aux_loss + z_loss, coefficients included",
        bound="in nats per token for a language model; lower is better",
        example="2.9, 0.02 and 0.001: 2.9 + 0.02 + 0.001 = 2.921",
        also=("training loss",),
        see=("ce_loss", "aux_loss", "z_loss"),
    ),
    Entry(
        key="ce_loss",
        name="Cross-entropy",
        meaning="How badly the model predicts the next token, without auxiliary losses. Runs on the same text and "
        "tokens compare by it.",
        formula="mean over tokens of -ln(probability of the right token)",
        bound="at least 0; ln(vocabulary) for guessing; lower is better",
        example="probabilities 0.5 and 0.25: (ln(2) + ln(4)) / 2 = 1.0397",
        also=("cross-entropy", "nats"),
        see=("loss",),
    ),
    Entry(
        key="held_out_loss",
        name="Held-out loss",
        meaning="Cross-entropy of text that training never sees, measured in eval mode. Where it rises while the "
        "training loss falls, the model learns its texts by heart.",
        formula="mean over tokens of -ln(probability of the right token)",
        bound="at least 0; lower is better",
        also=("held-out", "validation loss"),
        see=("ce_loss", "phase"),
    ),
    Entry(
        key="smoothing",
        name="Smoothing",
        meaning="An exponential moving average with bias correction that skips values that are not finite. The raw "
        "curve stays visible behind it.",
        formula="m_t = w m_(t-1) + (1 - w) x_t, shown as m_t / (1 - w^t)",
        also=("EMA",),
        see=("loss",),
    ),
    Entry(
        key="grad_norm",
        name="Gradient norm",
        meaning="Length of the gradient of all parameters in a step. Sudden peaks often come before a loss that is "
        "not finite.",
        formula="sqrt(sum of squares)",
        bound="at least 0",
        example="a gradient of 3 and 4: sqrt(3**2 + 4**2) = 5",
        also=("learning_rate", "learning rate"),
        see=("loss",),
    ),
)
