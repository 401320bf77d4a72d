//! What a peer must agree with before it is used, and what it tells about itself besides.

use std::collections::{BTreeMap, BTreeSet};

use container::config::{MAX_ROUTED_EXPERTS, half_hash};
use container::{Config, LayerKind, hex};
use experts::LocalExperts;
use experts::cache::Key as ExpertKey;
use numerics::{Activations, NUMERICS_VERSION};
use serde::{Deserialize, Serialize};

use crate::session::shown;
use crate::wire::{Shape, WireError};

/// Most bytes of the facts as JSON.
pub(crate) const FACTS_BYTES_MAX: usize = 32 << 10;
/// Bytes of a run of holdings before its hashes.
const RUN_HEAD: usize = 16;

/// A machine's model and arithmetic, and what it is otherwise.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Facts {
    /// Version of the arithmetic.
    pub numerics: u32,
    /// Activations that meet quantised weights.
    pub activations: String,
    /// Hash of the configuration, hexadecimal.
    pub model: String,
    /// Numbers per row.
    pub hidden: u32,
    /// Width of an expert.
    pub intermediate: u32,
    /// Layers, one that predicts further tokens included.
    pub layers: u32,
    /// Experts per layer.
    pub experts: u32,
    /// Version of the program; says nothing about results.
    #[serde(default)]
    pub engine: String,
    /// Instruction-set level; says nothing about results.
    #[serde(default)]
    pub isa: String,
    /// Compute threads.
    #[serde(default)]
    pub threads: u32,
    /// Memory ceiling in bytes.
    #[serde(default)]
    pub ram_bytes: u64,
    /// Bytes of experts that may be in memory.
    #[serde(default)]
    pub cache_bytes: u64,
    /// Most bytes of rows of a request or of its outputs.
    #[serde(default)]
    pub request_bytes: u64,
    /// Whether it only looks: it need not agree with anything, and may not ask for outputs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub observer: bool,
}

/// Two machines that do not compute the same.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{field} is {coordinator} at the coordinator and {worker} at the worker; both must have \
     {remedy}"
)]
pub struct Mismatch {
    /// What differs.
    pub field: &'static str,
    /// The coordinator's.
    pub coordinator: String,
    /// The worker's.
    pub worker: String,
    /// What both must have.
    pub remedy: &'static str,
}

impl Facts {
    /// Those of a model on this machine; what it is otherwise is to be filled in.
    pub fn new(config: &Config, activations: Activations) -> Facts {
        let shape = Shape::of(config);
        Facts {
            activations: activations.to_string(),
            model: hex::encode(&config.identity()),
            hidden: shape.hidden,
            intermediate: shape.intermediate,
            layers: shape.layers,
            experts: shape.experts,
            observer: false,
            ..Facts::of_observer()
        }
    }

    /// Those of a machine that only looks.
    pub fn of_observer() -> Facts {
        Facts {
            numerics: NUMERICS_VERSION,
            engine: env!("CARGO_PKG_VERSION").to_owned(),
            observer: true,
            ..Facts::default()
        }
    }

    /// The shape of its model.
    pub fn shape(&self) -> Shape {
        let Facts { hidden, intermediate, layers, experts, .. } = *self;
        Shape { hidden, intermediate, layers, experts }
    }

    /// The first thing in which the facts of a coordinator and a worker differ.
    pub fn compare(coordinator: &Facts, worker: &Facts) -> Result<(), Mismatch> {
        let model = "the same model";
        let number = |field: &'static str, here: u32, there: u32, remedy| {
            (field, here.to_string(), there.to_string(), remedy)
        };
        let facts = [
            number(
                "the numerics version",
                coordinator.numerics,
                worker.numerics,
                "versions of colibri with the same",
            ),
            number("the hidden size", coordinator.hidden, worker.hidden, model),
            number("the expert width", coordinator.intermediate, worker.intermediate, model),
            number("the number of layers", coordinator.layers, worker.layers, model),
            number("the number of experts", coordinator.experts, worker.experts, model),
            ("the hash of config.json", coordinator.model.clone(), worker.model.clone(), model),
            (
                "--activations",
                coordinator.activations.clone(),
                worker.activations.clone(),
                "the same --activations",
            ),
        ];
        for (field, ours, theirs, remedy) in facts {
            if ours != theirs {
                // Text of a peer, to be shown.
                let (coordinator, worker) = (shown(&ours, 64), shown(&theirs, 64));
                return Err(Mismatch { field, coordinator, worker, remedy });
            }
        }
        Ok(())
    }
}

/// What is known of an expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Identity {
    /// Nothing more.
    Unknown,
    /// A hash over all of it, recorded with it.
    Whole([u8; 16]),
    /// A hash over a sample of it.
    Sample([u8; 16]),
}

impl Identity {
    /// The number that stands for the kind in a greeting, and the hash.
    fn parts(&self) -> (u32, Option<&[u8; 16]>) {
        match self {
            Identity::Unknown => (0, None),
            Identity::Whole(hash) => (1, Some(hash)),
            Identity::Sample(hash) => (2, Some(hash)),
        }
    }
}

/// Experts of a model that are sampled where they have no hashes.
const SAMPLED: usize = 64;

/// The experts that are sampled, the same on every machine.
fn sampled(config: &Config) -> BTreeSet<ExpertKey> {
    let layers = (0..config.all_layers())
        .filter(|layer| config.layer_kind(*layer) == Some(LayerKind::Sparse));
    let keys = layers
        .flat_map(|layer| (0..config.moe.experts).map(move |expert| (layer as u32, expert as u32)));
    let drawn = |key: ExpertKey| (half_hash(format!("{}.{}", key.0, key.1).as_bytes()), key);
    let mut keys: Vec<_> = keys.map(drawn).collect();
    keys.sort_unstable();
    keys.into_iter().take(SAMPLED).map(|(_, key)| key).collect()
}

/// Which experts a machine holds, and what each is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Holdings {
    experts: BTreeMap<ExpertKey, Identity>,
}

impl Holdings {
    /// The experts of this machine. Of some that have no hashes a sample is read.
    pub fn of(local: &LocalExperts, config: &Config) -> Holdings {
        let (table, sampled) = (local.table(), sampled(config));
        let identity = |key: ExpertKey| match table.get(key).and_then(|source| source.identity()) {
            Some(hash) => Identity::Whole(hash),
            None if sampled.contains(&key) => {
                local.sampled_identity(key).map_or(Identity::Unknown, Identity::Sample)
            }
            None => Identity::Unknown,
        };
        Holdings { experts: table.keys().map(|key| (key, identity(key))).collect() }
    }

    /// Experts of which nothing more is known.
    pub fn of_keys(keys: impl IntoIterator<Item = ExpertKey>) -> Holdings {
        Holdings { experts: keys.into_iter().map(|key| (key, Identity::Unknown)).collect() }
    }

    /// Takes an expert out.
    pub fn remove(&mut self, key: ExpertKey) {
        self.experts.remove(&key);
    }

    /// Number of experts.
    pub fn len(&self) -> usize {
        self.experts.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.experts.is_empty()
    }

    /// Whether an expert is held.
    pub fn has(&self, key: ExpertKey) -> bool {
        self.experts.contains_key(&key)
    }

    /// The experts, ascending.
    pub fn keys(&self) -> impl Iterator<Item = ExpertKey> + use<'_> {
        self.experts.keys().copied()
    }

    /// The first expert that both know in the same way and that is not the same; else of how many
    /// the whole was compared.
    pub fn compare(&self, other: &Holdings) -> Result<usize, ExpertKey> {
        let mut compared = 0;
        for (key, theirs) in &other.experts {
            match (self.experts.get(key), theirs) {
                (Some(Identity::Whole(ours)), Identity::Whole(theirs)) if ours == theirs => {
                    compared += 1;
                }
                (Some(Identity::Sample(ours)), Identity::Sample(theirs)) if ours == theirs => {}
                (Some(Identity::Whole(_)), Identity::Whole(_))
                | (Some(Identity::Sample(_)), Identity::Sample(_)) => return Err(*key),
                _ => {}
            }
        }
        Ok(compared)
    }

    /// Appends runs of experts: layer, first expert, number, kind of what is known, hashes if any.
    fn put(&self, out: &mut Vec<u8>) {
        let mut rest = self.experts.iter().peekable();
        while let Some(((layer, first), identity)) = rest.next() {
            let (kind, hash) = identity.parts();
            let mut count = 1;
            let mut hashes: Vec<&[u8; 16]> = Vec::new();
            hashes.extend(hash);
            while let Some((_, next)) = rest.next_if(|((l, e), next)| {
                l == layer && *e == first + count && next.parts().0 == kind
            }) {
                hashes.extend(next.parts().1);
                count += 1;
            }
            for number in [*layer, *first, count, kind] {
                out.extend_from_slice(&number.to_le_bytes());
            }
            hashes.into_iter().for_each(|hash| out.extend_from_slice(hash));
        }
    }

    fn parse(mut rest: &[u8], shape: &Shape) -> Result<Holdings, WireError> {
        let malformed = |what| WireError::Malformed { what };
        let mut holdings = Holdings::default();
        while !rest.is_empty() {
            let head = rest.split_at_checked(RUN_HEAD);
            let (head, after) = head.ok_or(malformed("holdings end too early"))?;
            rest = after;
            let number =
                |at: usize| head[at..].first_chunk().map_or(0, |four| u32::from_le_bytes(*four));
            let [layer, first, count, known] = [0, 4, 8, 12].map(number);
            let is_within = layer < shape.layers
                && first < shape.experts
                && (1..=shape.experts - first).contains(&count)
                && known <= 2;
            if !is_within {
                return Err(malformed("holdings name experts that the model does not have"));
            }
            let hashes = rest.split_at_checked(count as usize * known.min(1) as usize * 16);
            let (hashes, after) = hashes.ok_or(malformed("holdings end too early"))?;
            rest = after;
            if holdings.len() + count as usize > MAX_ROUTED_EXPERTS {
                return Err(malformed("holdings name more experts than any model has"));
            }
            let mut hashes = hashes.as_chunks::<16>().0.iter();
            for expert in first..first + count {
                let identity = match (known, hashes.next()) {
                    (1, Some(hash)) => Identity::Whole(*hash),
                    (2, Some(hash)) => Identity::Sample(*hash),
                    _ => Identity::Unknown,
                };
                if holdings.experts.insert((layer, expert), identity).is_some() {
                    return Err(malformed("holdings name an expert twice"));
                }
            }
        }
        Ok(holdings)
    }
}

/// The body of a greeting.
pub fn greeting(facts: &Facts, holdings: &Holdings) -> Vec<u8> {
    // Strings and numbers only.
    let json = serde_json::to_vec(facts).unwrap_or_default();
    let mut body = Vec::with_capacity(4 + json.len() + holdings.len() * 16 + RUN_HEAD);
    body.extend_from_slice(&(json.len() as u32).to_le_bytes());
    body.extend_from_slice(&json);
    holdings.put(&mut body);
    body
}

/// Reads the facts of a greeting; the rest are the holdings.
pub fn facts_of(body: &[u8]) -> Result<(Facts, &[u8]), WireError> {
    let malformed = |what| WireError::Malformed { what };
    let (length, rest) = body.split_first_chunk().ok_or(malformed("a greeting ends too early"))?;
    let length = u32::from_le_bytes(*length) as usize;
    let json = rest.split_at_checked(length).filter(|_| length <= FACTS_BYTES_MAX);
    let (json, rest) = json.ok_or(malformed("the facts of a greeting are too long"))?;
    let facts = serde_json::from_slice(json);
    let mut facts: Facts =
        facts.map_err(|_| malformed("the facts of a greeting are not what they must be"))?;
    // They are shown to people.
    for text in [&mut facts.activations, &mut facts.model, &mut facts.engine, &mut facts.isa] {
        *text = shown(text, 64);
    }
    Ok((facts, rest))
}

/// Reads the holdings of a greeting, for a model of this shape.
pub fn holdings_of(rest: &[u8], shape: &Shape) -> Result<Holdings, WireError> {
    Holdings::parse(rest, shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { hidden: 4, intermediate: 6, layers: 9, experts: 20 };

    fn holdings(experts: &[(u32, u32, Option<u8>)]) -> Holdings {
        let expert = |(layer, expert, hash): &(u32, u32, Option<u8>)| {
            let identity = match hash {
                None => Identity::Unknown,
                Some(byte) if *byte >= 200 => Identity::Sample([*byte; 16]),
                Some(byte) => Identity::Whole([*byte; 16]),
            };
            ((*layer, *expert), identity)
        };
        Holdings { experts: experts.iter().map(expert).collect() }
    }

    #[test]
    fn holdings_survive_the_wire() {
        for experts in [
            &[][..],
            &[(1, 0, Some(1)), (1, 1, Some(2)), (1, 3, Some(3)), (2, 4, None), (2, 5, None)],
            &[(8, 16, Some(201)), (8, 17, Some(202)), (8, 18, None), (8, 19, Some(7))],
        ] {
            let holdings = holdings(experts);
            let mut bytes = Vec::new();
            holdings.put(&mut bytes);
            assert_eq!(Holdings::parse(&bytes, &SHAPE), Ok(holdings));
            for cut in 1..bytes.len() {
                if let Ok(part) = Holdings::parse(&bytes[..cut], &SHAPE) {
                    assert!(part.len() < experts.len());
                }
            }
        }
    }

    #[test]
    fn holdings_of_other_models_and_repeated_ones_are_refused() {
        for run in [
            [9, 0, 1, 0],
            [0, 20, 1, 0],
            [0, 19, 2, 0],
            [0, 0, 0, 0],
            [0, 1, u32::MAX, 1],
            [0, 0, 1, 3],
        ] {
            let bytes: Vec<u8> = run.iter().flat_map(|number| number.to_le_bytes()).collect();
            assert!(Holdings::parse(&bytes, &SHAPE).is_err(), "{run:?}");
        }
        let twice: Vec<u8> =
            [3, 3, 2, 0, 3, 4, 1, 0].iter().flat_map(|number: &u32| number.to_le_bytes()).collect();
        assert!(Holdings::parse(&twice, &SHAPE).is_err());
    }

    #[test]
    fn an_expert_that_differs_is_named_and_unknown_ones_are_not_compared() {
        let ours = holdings(&[(1, 0, Some(1)), (1, 1, Some(2)), (1, 2, None)]);
        let theirs = holdings(&[(1, 0, Some(1)), (1, 2, Some(9)), (5, 5, Some(4))]);
        assert_eq!(ours.compare(&theirs), Ok(1));
        let wrong = holdings(&[(1, 0, Some(1)), (1, 1, Some(3))]);
        assert_eq!(ours.compare(&wrong), Err((1, 1)));
        // A sample says nothing about a whole.
        let ours = holdings(&[(1, 0, Some(1)), (1, 1, Some(201))]);
        assert_eq!(ours.compare(&holdings(&[(1, 0, Some(200)), (1, 1, Some(201))])), Ok(0));
        assert_eq!(ours.compare(&holdings(&[(1, 1, Some(202))])), Err((1, 1)));
    }
}
