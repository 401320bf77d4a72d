//! Decoding with all weights in memory, for one sequence and for several together.

use std::time::Instant;

use container::{Attention, ContainerError, LayerKind, Model, Role, TensorSpec, tensors};
use experts::ExpertStats;
use models::KvShape;
use numerics::topk;
use runtime::{Engine, Session, Want, Work};

use super::{Rates, ReadLoop, tokens};
use crate::error::LabError;

/// Tokens of the prompt before the tokens that count.
pub const DECODE_PROMPT: usize = 8;

/// Figures of a decode bench.
#[derive(Clone, Debug)]
pub struct DecodeFigures {
    /// Tokens per second.
    pub tok_per_s: Rates,
    /// Weight bytes that every token must read.
    pub bytes_per_token: u64,
    /// Median of the read-bandwidth loop, in 10^9 bytes per second.
    pub read_gb_per_s: f64,
}

impl DecodeFigures {
    /// Tokens per second at which reading the weights alone would take all the time.
    pub fn limit_tok_per_s(&self) -> f64 {
        self.read_gb_per_s * 1e9 / self.bytes_per_token.max(1) as f64
    }

    /// Share of the limit reached.
    pub fn limit_ratio(&self) -> f64 {
        self.tok_per_s.median / self.limit_tok_per_s()
    }
}

/// Decodes `tokens` tokens after a short prompt, `repetitions` times (at least once), the read
/// loop between them. Its array of [`READ_BYTES`](super::READ_BYTES) is part of the memory that
/// the engine must have been told is held.
pub fn decode(
    engine: &Engine,
    tokens: usize,
    repetitions: usize,
) -> Result<DecodeFigures, LabError> {
    let read_loop = ReadLoop::default();
    let (mut rates, mut reads) = (Vec::new(), Vec::new());
    for repetition in 0..=repetitions.max(1) {
        let read = read_loop.measure(&engine.compute().team);
        let rate = tokens as f64 / run(engine, 0..1, tokens)?.seconds;
        // The first repetition fills caches.
        if repetition > 0 {
            rates.push(rate);
            reads.push(read);
        }
    }
    Ok(DecodeFigures {
        tok_per_s: Rates::of(rates),
        bytes_per_token: weight_bytes_of(engine.model())?.per_token(),
        read_gb_per_s: Rates::of(reads).median,
    })
}

/// Figures of several sequences decoded together beside one alone.
#[derive(Clone, Debug)]
pub struct BatchFigures {
    /// Sequences.
    pub batch: usize,
    /// Tokens per second of all of them together.
    pub tok_per_s: Rates,
    /// Tokens per second of one sequence alone.
    pub single_tok_per_s: Rates,
    /// Bytes of weights, keys and values that a step of one sequence reads.
    pub single_bytes: u64,
    /// The same for a step of all sequences, by the experts they chose.
    pub batch_bytes: u64,
    /// Bytes of keys and values among them, per sequence, for the token in the middle.
    pub attended_bytes: u64,
    /// Median of the read-bandwidth loop, in 10^9 bytes per second.
    pub read_gb_per_s: f64,
}

impl BatchFigures {
    /// Tokens per second gained over one sequence.
    pub fn gain(&self) -> f64 {
        self.tok_per_s.median / self.single_tok_per_s.median
    }

    /// The gain that the bytes allow.
    pub fn allowed_gain(&self) -> f64 {
        self.batch as f64 * self.single_bytes as f64 / self.batch_bytes.max(1) as f64
    }
}

/// Decodes one sequence and `batch` sequences in turns. Fails when the logits of a sequence in the
/// batch differ from those of the sequence alone.
pub fn decode_batch(
    engine: &Engine,
    batch: usize,
    tokens: usize,
    repetitions: usize,
) -> Result<BatchFigures, LabError> {
    let read_loop = ReadLoop::default();
    let alone: Vec<String> = (0..batch)
        .map(|sequence| Ok(run(engine, sequence..sequence + 1, tokens)?.fingerprints.remove(0)))
        .collect::<Result<_, LabError>>()?;
    let bytes = weight_bytes_of(engine.model())?;
    let (mut singles, mut together, mut reads) = (Vec::new(), Vec::new(), Vec::new());
    let mut distinct = 0.0;
    for repetition in 0..=repetitions.max(1) {
        let read = read_loop.measure(&engine.compute().team);
        let single = run(engine, 0..1, tokens)?;
        let all = run(engine, 0..batch, tokens)?;
        for (sequence, (got, want)) in all.fingerprints.iter().zip(&alone).enumerate() {
            if got != want {
                return Err(LabError::Check(format!(
                    "sequence {sequence} in a batch of {batch} has other logits than alone"
                )));
            }
        }
        if repetition > 0 {
            singles.push(tokens as f64 / single.seconds);
            together.push((batch * tokens) as f64 / all.seconds);
            reads.push(read);
            distinct = all.chosen() as f64 / tokens as f64;
        }
    }
    let attended_bytes = attended_bytes(engine, DECODE_PROMPT + tokens.div_ceil(2));
    Ok(BatchFigures {
        batch,
        tok_per_s: Rates::of(together),
        single_tok_per_s: Rates::of(singles),
        single_bytes: bytes.per_token() + attended_bytes,
        batch_bytes: bytes.layers
            + bytes.head
            + (distinct * bytes.expert) as u64
            + batch as u64 * attended_bytes,
        attended_bytes,
        read_gb_per_s: Rates::of(reads).median,
    })
}

/// Bytes of keys and values that a token at `positions` reads.
fn attended_bytes(engine: &Engine, positions: usize) -> u64 {
    let chosen = match &engine.config().attention {
        Attention::Mla { indexer: Some(indexer), .. } => positions.min(indexer.topk),
        _ => positions,
    };
    KvShape::of(engine.model()).attended_bytes(positions, chosen) as u64
}

/// Seconds of `count` tokens of one sequence after a short prompt.
pub(crate) fn timed_decode(engine: &Engine, count: usize) -> Result<f64, LabError> {
    Ok(run(engine, 0..1, count)?.seconds)
}

pub(super) struct Run {
    /// Seconds of the tokens that count.
    pub seconds: f64,
    /// Fingerprint of each sequence's logits.
    pub fingerprints: Vec<String>,
    /// What the experts' backend had done before the tokens that count, and after.
    pub stats: [ExpertStats; 2],
}

impl Run {
    /// Experts chosen in the steps that count, each once per step and layer.
    pub fn chosen(&self) -> u64 {
        let chosen = |stats: &ExpertStats| stats.hits + stats.guessed_hits + stats.misses;
        chosen(&self.stats[1]) - chosen(&self.stats[0])
    }
}

/// Decodes `count` tokens of each of some sequences, all of them in every step.
pub(super) fn run(
    engine: &Engine,
    sequences: std::ops::Range<usize>,
    count: usize,
) -> Result<Run, LabError> {
    let vocab = engine.config().vocab_size;
    let mut sessions: Vec<Session> = sequences
        .clone()
        .map(|_| Ok(engine.session().map_err(runtime::OpenError::from)?))
        .collect::<Result<_, LabError>>()?;
    let mut hidden = Vec::new();
    for (session, sequence) in sessions.iter_mut().zip(sequences.clone()) {
        let prompt = tokens(DECODE_PROMPT, vocab, sequence);
        let work = Work { session, tokens: &prompt, want: Want::Last };
        hidden.extend_from_slice(&engine.step(&mut [work])?[0]);
    }
    let mut fingerprints: Vec<_> =
        sequences.clone().map(|_| runtime::Fingerprint::default()).collect();
    let (before, started) = (engine.expert_stats(), Instant::now());
    // Tokens given beforehand: random weights would soon answer with one token for ever.
    let given: Vec<Vec<u32>> =
        sequences.map(|sequence| tokens(count, vocab, 101 * sequence + 7)).collect();
    for step in 0..count {
        let mut fingerprints = fingerprints.iter_mut();
        engine.each_logits(&hidden, |logits| {
            if let Some(fingerprint) = fingerprints.next() {
                fingerprint.add(logits);
            }
            std::hint::black_box(topk::argmax(logits));
        })?;
        let mut work: Vec<Work<'_>> = sessions
            .iter_mut()
            .zip(&given)
            .map(|(session, given)| Work { session, tokens: &given[step..=step], want: Want::Last })
            .collect();
        hidden = engine.step(&mut work)?.concat();
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(Run {
        seconds,
        fingerprints: fingerprints.iter().map(runtime::Fingerprint::hex).collect(),
        stats: [before, engine.expert_stats()],
    })
}

/// Weight bytes of a model as decoding reads them.
pub struct WeightBytes {
    /// Dense weights of the decoder layers.
    pub layers: u64,
    /// The head.
    pub head: u64,
    /// One expert, on average.
    pub expert: f64,
    /// Experts that one token is routed to, all layers together.
    pub routed: usize,
    /// Experts stored, all layers together.
    pub experts: usize,
}

impl WeightBytes {
    /// Bytes that one token reads.
    pub fn per_token(&self) -> u64 {
        self.layers + self.head + (self.expert * self.routed as f64) as u64
    }
}

/// Reads the sizes off the container.
pub fn weight_bytes_of(model: &Model) -> Result<WeightBytes, LabError> {
    let config = &model.config;
    let stored = |spec: &TensorSpec| -> Result<u64, ContainerError> {
        Ok(model.find(spec)?.map_or(0, |source| source.bytes()))
    };
    let mut bytes = WeightBytes { layers: 0, head: 0, expert: 0.0, routed: 0, experts: 0 };
    for spec in tensors::model_specs(config) {
        if spec.role != Role::Embedding || config.tie_embeddings {
            bytes.head += stored(&spec)?;
        }
    }
    let mut of_experts = 0;
    for layer in 0..config.layers {
        for spec in tensors::layer_specs(config, layer) {
            bytes.layers += stored(&spec)?;
        }
        if config.layer_kind(layer) == Some(LayerKind::Sparse) {
            for expert in 0..config.moe.experts {
                for spec in tensors::expert_specs(config, layer, expert).into_iter().flatten() {
                    of_experts += stored(&spec)?;
                }
            }
            bytes.routed += config.moe.top_k;
            bytes.experts += config.moe.experts;
        }
    }
    bytes.expert = of_experts as f64 / bytes.experts.max(1) as f64;
    Ok(bytes)
}
