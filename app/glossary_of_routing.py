"""Words of the glossary: routers, balancers, losses and the parts of a model."""

from app.glossary_entry import Entry

SWITCH = "Switch Transformer, Fedus et al. 2101.03961"

ENTRIES = (
    Entry(
        key="moe_layer",
        name="MoE layer",
        meaning="A layer whose feed-forward part is a set of experts, of which each token uses a few. Layers are "
        "numbered by their place in the whole model, dense layers counted.",
        also=("layer", "mixture of experts", "dense layer", "dense"),
        see=("num_experts", "top_k", "router"),
    ),
    Entry(
        key="num_experts",
        name="Experts (E)",
        meaning="Feed-forward networks of one layer that tokens are routed to. Shared experts are not counted among"
        " them.",
        also=("expert", "experts", "E"),
        see=("top_k", "shared_experts"),
    ),
    Entry(
        key="top_k",
        name="Top-k (k)",
        meaning="How many experts each token uses in a layer. A token's experts are distinct, the best selection "
        "score first.",
        bound="1 to E",
        also=("k", "top-k"),
        see=("num_experts", "assignment"),
    ),
    Entry(
        key="router",
        name="Router",
        meaning="The small linear map that scores every expert for a token. A layer may have several, as where "
        "encoder and decoder share an index; each has a number of its own.",
        also=("gate", "routing"),
        see=("logits", "scores"),
    ),
    Entry(
        key="logits",
        name="Router logits",
        meaning="What the router gives for each expert before any score function, noise or bias. Computed in "
        "float32 even where the rest of the model is not.",
        also=("logit",),
        see=("scores", "z_loss"),
    ),
    Entry(
        key="scores",
        name="Score",
        meaning="The logits after the score function: softmax over all experts, or a sigmoid for each on its own. "
        "Experts are chosen by score plus bias, weights come from the score alone.",
        formula="softmax: exp(x_e) / sum(exp(x)); sigmoid: 1 / (1 + exp(-x_e))",
        bound="0 to 1",
        source="sigmoid: DeepSeek-V3, 2412.19437",
        example="logits 1, 0, -1, softmax of the first: exp(1) / (exp(1) + exp(0) + exp(-1)) = 0.6652",
        also=("score function", "softmax", "sigmoid", "router probability"),
        see=("expert_bias", "weights"),
    ),
    Entry(
        key="weights",
        name="Gate value",
        meaning="How much an expert's output counts in a token's sum. Taken from the unbiased scores of the chosen "
        "experts, where the recipe says so divided by their sum.",
        formula="s_e, or s_e / sum of s over the k chosen",
        bound="0 to 1, times the routed scaling factor",
        example="logits 1, 0, -1, top-2, divided: 0.6652 / (0.6652 + 0.2447) = 0.7311",
        also=("weight", "gate value", "routed scaling factor", "routed_scaling_factor"),
        see=("gate_mass", "scores"),
    ),
    Entry(
        key="gate_mass",
        name="Gate mass",
        meaning="Sum of the gate values that an expert got. An expert with much load and little mass is asked often"
        " and heard little.",
        formula="sum of the weights of expert e",
        bound="0 to its load, where weights are at most 1",
        example="weights 0.7 and 0.2: 0.7 + 0.2 = 0.9",
        see=("load", "weights"),
    ),
    Entry(
        key="mean_prob",
        name="Mean router probability",
        meaning="What the router gives an expert on average over all tokens, chosen or not. Sigmoid scores are "
        "divided by their sum first.",
        formula="P_e = mean over tokens of p_t,e",
        bound="0 to 1; sums to 1 over the experts",
        source=SWITCH,
        example="probabilities 0.9 and 0.5 of two tokens: (0.9 + 0.5) / 2 = 0.7",
        also=("P",),
        see=("aux_loss",),
    ),
    Entry(
        key="router_entropy",
        name="Router entropy",
        meaning="How undecided the router is: the entropy of each token's probabilities, mean over tokens. A "
        "balanced load says nothing of it, and it nothing of the load.",
        formula="mean over tokens of -sum(p ln p) / ln E",
        bound="0 (certain) to 1 (no preference)",
        example="one token, probabilities 0.5, 0.5, 0, 0: ln(2) / ln(4) = 0.5",
        see=("load_entropy",),
    ),
    Entry(
        key="balancer",
        name="Balancer",
        meaning="What keeps the load even: an auxiliary loss, or a selection bias that is moved by rule. Without "
        "one (none), watch experts collapse.",
        also=("none", "aux"),
        see=("aux_loss", "sign_bias", "quantile_balancer"),
    ),
    Entry(
        key="aux_loss",
        name="Aux loss",
        meaning="The load-balancing loss, here without its coefficient and normalised so that an even load gives 1."
        " Below 1 the router's probabilities lean to experts that get less; in the table of steps it is "
        "what was added to the loss, coefficient included.",
        formula="E * sum of f_e P_e",
        bound="1 is uniform; up to E/k where everything goes to the same experts",
        source=f"{SWITCH}, eq. 4-6",
        example="shares 0.75, 0.25 and P 0.6, 0.4: 2 * (0.75 * 0.6 + 0.25 * 0.4) = 1.1",
        also=("auxiliary loss", "load-balancing loss", "aux coefficient", "aux_coef"),
        see=("mean_prob", "z_loss", "balancer"),
    ),
    Entry(
        key="z_loss",
        name="Router z-loss",
        meaning="A loss on large router logits, which round badly and train unstably. Taken before noise; in the "
        "table of steps with its coefficient.",
        formula="mean over tokens of ln(sum(exp(x)))^2",
        bound="at least 0; ln(E)^2 for logits of zero",
        source="ST-MoE 2202.08906, eq. 5",
        example="4 experts, logits 0: ln(4)**2 = 1.9218",
        also=("z coefficient", "z_coef"),
        see=("logits",),
    ),
    Entry(
        key="expert_bias",
        name="Expert bias",
        meaning="A number for each expert that is added to its score for the selection, never for the weights. The "
        "balancer moves it, and no gradient knows of it.",
        formula="chosen: the k greatest s_e + b_e",
        bound="any; its mean is 0",
        source="Wang et al. 2408.15664",
        also=("bias", "selection bias"),
        see=("rerouted_share", "sign_bias", "quantile_balancer"),
    ),
    Entry(
        key="sign_bias",
        name="Sign-bias balancer",
        meaning="After each optimizer step the bias of an expert with less than the mean load goes up by a fixed "
        "rate, that of one with more goes down. The size of the difference does not matter, which makes it "
        "slow and steady.",
        formula="d = rate * sign(mean(c) - c); b := b + d - mean(d)",
        bound="a step moves each bias by at most twice the rate",
        source="auxiliary-loss-free balancing, Wang et al. 2408.15664; DeepSeek-V3, 2412.19437",
        example="loads 6, 1, 1, 0, rate 0.1, bias of expert 0: -0.1 - (-0.1 + 0.1 + 0.1 + 0.1) / 4 = -0.15",
        also=("sign-bias", "bias_rate", "bias rate", "aux-loss-free"),
        see=("expert_bias",),
    ),
    Entry(
        key="quantile_balancer",
        name="Quantile balancer",
        meaning="Each batch says by how much an expert's scores miss the tokens' thresholds; the bias becomes the "
        "k/E quantile of that. So about the right number of tokens would choose each expert, after one "
        "batch.",
        formula="b_e = quantile over tokens of (threshold_t - s_t,e) at k/E, less the mean over experts",
        also=("quantile",),
        see=("threshold", "expert_bias"),
    ),
    Entry(
        key="threshold",
        name="Threshold",
        meaning="The (k+1)-th best corrected score of a token: what an expert must beat to be chosen. The quantile "
        "balancer works with it.",
        formula="(k+1)-th greatest of s_e + b_e",
        bound="there is none where k = E",
        example="corrected scores 0.5, 0.3, 0.2, top-1: 0.3 = 0.3",
        also=("top-k+1", "corrected score"),
        see=("quantile_balancer",),
    ),
    Entry(
        key="rerouted_share",
        name="Rerouted share",
        meaning="Share of the assignments that the bias changed: without it the token would have gone to another "
        "expert. It says how much the balancer overrules the router.",
        formula="rerouted / (T k)",
        bound="0 (the bias changes nothing) to 1",
        example="30 of 400 assignments: 30 / 400 = 0.075",
        also=("rerouted",),
        see=("expert_bias",),
    ),
    Entry(
        key="invalid",
        name="Invalid rows",
        meaning="Tokens that could not be routed, as too few of their logits were finite. They get no expert, and "
        "the other tokens are untouched.",
        bound="0 to T",
        also=("invalid rows", "invalid_rows", "unrouted"),
        see=("logits",),
    ),
    Entry(
        key="shared_experts",
        name="Shared experts",
        meaning="Experts that every token uses, beside the routed ones. They have no load to balance.",
        source="DeepSeekMoE, 2401.06066",
        also=("num_shared_experts", "shared expert"),
        see=("num_experts",),
    ),
    Entry(
        key="latent_size",
        name="Latent size",
        meaning="The width in which routed experts work where it is less than the model's. Tokens are compressed "
        "once before, and expanded once after; router and shared experts see the full width.",
        also=("latent", "latent MoE"),
        see=("shared_experts",),
    ),
    Entry(
        key="parameters",
        name="Parameters, active parameters",
        meaning="Active are those a token uses: all routed experts of a layer replaced by k of them. Three "
        "conventions are in use: all, without the input embedding, and without both embeddings.",
        formula="an expert: 3 D F with a gate (GLU), 2 D F without, and biases",
        example="a GLU expert of width 64 and 128: 3 * 64 * 128 = 24576",
        also=("active", "total_parameters", "active_parameters"),
        see=("num_experts",),
    ),
    Entry(
        key="dispatcher",
        name="Dispatcher",
        meaning="What takes each token to its experts and adds up what they give. All give the same result and "
        "differ in speed.",
        also=("naive", "masked", "sorted", "grouped"),
        see=("assignment",),
    ),
)
