"""Words of training programs: their names for counters, losses and rates, in several languages.

Other spellings and translations are mapped to one name; the rest of the grammar uses only those names.
"""

from __future__ import annotations

from typing import FrozenSet

KINDS = ("step", "validation", "throughput", "summary", "target")
# The values of a metrics record: docs/metrics.md explains each.
VALUES = (
    "step", "steps", "epoch", "epochs", "batch", "batches", "loss", "validation", "accuracy", "lr", "grad_norm",
    "step_time", "tokens_per_s", "samples_per_s", "tflops_per_device", "memory_gib", "target_reached", "total_s", "nodes",
    "gpus_per_node", "gpus",
)  # fmt: skip
COUNTERS = ("step", "steps", "epoch", "epochs", "batch", "batches")
# Owner of a value: the printing rank, the average of one device, or the whole job; `unknown` if the line does not say.
WHOSE = ("rank", "device", "all", "unknown")
WHOLE = ("step", "steps", "epochs", "batch", "batches", "nodes", "gpus_per_node", "gpus")


def _set(words: str) -> FrozenSet[str]:
    return frozenset(words.split())


# Other spellings of words, and their translations.
ALIASES = {
    word: name
    for name, words in {
        "step": "upd iterate schritt étape etape paso passo stap krok adım шаг 步数 步 ステップ 단계",
        "round": "runde ronde ronda rodada",
        "epoch": "epoka epok epocha epoche époque epoque época epoca эпоха pass durchlauf 轮次 轮数 轮 エポック 에포크",
        "iteration": "itération iteración iterazione итерация 迭代次数 迭代",
        "logloss": "mlogloss",
        "error": "merror",
        "nll": "nloglik",
        "loss": "trainloss avgloss verlust trainingsverlust verlies strata kayıp "
        "perte pérdida perdida perda perdita потери потеря 损失值 损失 損失 손실",
        "lr": "lernrate 学习率 学習率 학습률",
        "rate": "taux tasa taxa tasso скорость",
        "learning": "apprentissage aprendizaje aprendizado aprendizagem apprendimento",
        "val loss": "validierungsverlust testverlust",
        "accuracy": "genauigkeit précision precisión acurácia exactitud exactitude accuratezza precisione dokładność doğruluk "
        "точность 准确率 精度 정확도",
        "mean": "mittlerer moyenne media média средние средняя 平均 평균",
        "train": "tr trn trainings entraînement entrenamiento treino addestramento обучение обучения обучении 训练 訓練 学習 "
        "훈련",
        "val": "va vl vld vali validierung validación validação validazione валидация валидации проверке 验证 驗證 検証 검증",
        "after": "nach",
    }.items()
    for word in words.split()
}
INITIALS = {"e": "epoch", "b": "batch", "i": "step", "s": "step", "l": "loss", "v": "val loss", "gn": "norm"}
HAS_COUNTED = _set("after completed finished done at processed trained on seen")
LINKS = _set("at after for on in")  # `loss at step 12`
STEP = _set(
    "step steps iter iters iteration iterations it itr itn niter nstep nsteps gstep update updates nupdates timestep timesteps"
)
ROUNDS = _set(
    "round rounds cycle generation gen tick ticks episode episodes frame frames"
)  # steps, if nothing else is counted
LOSSES = _set("loss xent nll mse bce objective logloss crossentropy bpb bpc bpd learn")
OTHER_LOSSES = (
    {"cost"},
    {"cross", "entropy"},
    {"ce"},
    {"bits", "dim"},
    {"bit", "dim"},
    {"neg", "log", "likelihood"},
    {"negative", "log", "likelihood"},
)
OF_ENTROPY = _set("avg average mean softmax with logits sparse categorical")
QUALITIES = _set("ppl perplexity err error rmse mae reward return score fitness psnr iou dice wer cer bleu auc")
ERRORS = _set("rmse mae mape rmsle error err")
_REWARDS = _set("reward rewards")
IMPROVED = LOSSES | _REWARDS
OBJECTIVES = _set(
    "ctc mlm clm sft dpo l recon reconstruction diffusion contrastive huber triplet elbo masked causal language"
)
BATCH = _set("batch batches minibatch")
EPOCH = _set("epoch epochs ep")
VALIDATION = _set("val valid validation eval evaluation evaluate evaluating test testing dev validate cv holdout")
TEST = _set("test testing")  # the set beside the one for validation
# Words that do not change what a key names.
NOISE = _set(
    "so far info debug main root current cur train training trainer learner global completed end of perf de du des di en na "
    "на в"
)
BEFORE = _set("at after")  # the words before them belong to something else: `loss at iteration`
LOSS = NOISE | _set(
    "total tot avg avr ave average mean running reduced smoothed smooth batch epoch step lm ce cross entropy per iter mini "
    "binary all ema moving sum averaged last local pretrain losses token tok nll mse bce"
)
PARTS = _set("ce cross entropy")
LR = _set("lr learning rate base optim optimizer group groups param params pg g adam adamw sgd l r")
MEMORY = _set("mem memory vram max peak gpu allocated alloc active gib gb mb")
TFLOPS = _set("tflops tflop s per second sec model throughput") | _set("gpu gpus device chip worker")
ACCURACY = NOISE | _set("top prec 1 sparse categorical binary avg average set approx")
ACCURACIES = _set("acc accuracy accu")
NOUNS = {
    **dict.fromkeys(_set("tokens token tok toks words word"), "tokens_per_s"),
    **dict.fromkeys(
        _set(
            "samples sample images image imgs img examples example ex sequences sequence seqs seq sentences sents sent"
        ),
        "samples_per_s",
    ),
}
SECOND = _set("s sec secs second seconds")
DEVICE = _set("gpu gpus device chip worker")
RATES = {**dict.fromkeys(_set("tps wps tgs"), "tokens_per_s"), **dict.fromkeys(_set("ips fps sps"), "samples_per_s")}
TIMES = {"ms": 1e-3, "us": 1e-6, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0}
SIZES = {"G": 1.0, "GB": 1.0, "GiB": 1.0, "M": 1 / 1024, "MB": 1 / 1024, "MiB": 1 / 1024}
COUNTED_WITH = _set("of max total num n nb out planned target all")
OF_TRIALS = _set("trial trials fold folds client clients")
NO_COUNTER = _set(
    "client worker fold trial run model layer head seed rank size params time t elapsed seconds sec s eta mem memory gpu gpus "
    "seen world node nodes pid port bs remaining left runtime"
)
# Counts, speeds, settings and values of training: no measures of a validation.
NO_QUALITY = (
    (NO_COUNTER | SECOND | STEP | BATCH)
    | {f"n{noun}" for noun in NOUNS}
    | _set("lr best per alpha beta threshold count data temp temperature train training decay process throughput")
)
# Quantities of simulations and solvers, which count steps too.
PHYSICS = _set(
    "energy etot epot ekin eptot ektot toteng poteng kineng pot kin potential kinetic enthalpy temp temperature press pressure "
    "volume density residual residuals courant cfl drag lift displacement velocity fmax magnetization virial rms rmsd ns fs ps"
)
COUNTING = frozenset("ebis") | STEP | EPOCH | BATCH
MORE_OF_A_COUNTER: FrozenSet[str] = _set(
    "num number idx index no optimizer opt max mini env i n id count done finish finished total learning "
    "start starting begin beginning going into"
)
