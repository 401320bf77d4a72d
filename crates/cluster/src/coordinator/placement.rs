//! Which worker computes an expert: a function of the expert, the workers and their weights.

use std::ops::Range;
use std::str::FromStr;

/// Where an expert is computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// By the coordinator.
    Local,
    /// By a worker, by its number.
    Worker(usize),
}

/// An operator's rule: experts of some layers belong to one place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    /// The layers.
    pub layers: Range<usize>,
    /// The experts of each.
    pub experts: Range<usize>,
    /// `local`, or the name of a worker.
    pub place: String,
}

impl Rule {
    /// Whether it speaks of nothing but experts of a model with so many layers and experts per
    /// layer.
    pub fn is_within(&self, layers: usize, experts: usize) -> bool {
        let all = self.experts == (0..usize::MAX);
        self.layers.end <= layers && (all || self.experts.end <= experts)
    }

    /// Whether it speaks of an expert.
    pub fn covers(&self, layer: usize, expert: u32) -> bool {
        self.layers.contains(&layer) && self.experts.contains(&(expert as usize))
    }
}

/// `A-B`, both counted in, or one number.
pub fn parse_span(text: &str) -> Result<Range<usize>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.parse::<u32>().map(|number| number as usize);
    match (number(first), number(last)) {
        (Ok(first), Ok(last)) if first <= last => Ok(first..last + 1),
        (Ok(_), Ok(_)) => Err("the first must not be after the last".to_owned()),
        _ => Err("must be A-B, such as 0-127, or one number".to_owned()),
    }
}

impl FromStr for Rule {
    type Err = String;

    /// `layers A-B[,experts C-D]=NAME`; `local` names the coordinator.
    fn from_str(text: &str) -> Result<Rule, String> {
        let form = "must be `layers A-B=WORKER` or `layers A-B,experts C-D=WORKER`, with `local` \
                    for this machine";
        let (what, place) = text.rsplit_once('=').ok_or(form)?;
        let (layers, experts) = match what.split_once(',') {
            None => (what, None),
            Some((layers, experts)) => (layers, Some(experts)),
        };
        let layers = layers.trim().strip_prefix("layers ").ok_or(form)?;
        let experts = match experts {
            None => 0..usize::MAX,
            Some(text) => parse_span(text.trim().strip_prefix("experts ").ok_or(form)?.trim())?,
        };
        let place = place.trim();
        if place.is_empty() {
            return Err(form.to_owned());
        }
        Ok(Rule { layers: parse_span(layers.trim())?, experts, place: place.to_owned() })
    }
}

/// The worker with the highest draw for an expert among those that are there, each with its weight:
/// shares are as the weights, and only the experts of a worker that comes or goes move (weighted
/// rendezvous hashing).
pub fn owner(
    layer: usize,
    expert: u32,
    workers: impl Iterator<Item = (usize, u64, f64)>,
) -> Option<usize> {
    let draw = |id: u64, weight: f64| {
        let mixed = mix(mix(mix(id) ^ layer as u64) ^ u64::from(expert));
        // A number in (0, 1): its logarithm over the weight is an exponential draw.
        let unit = ((mixed >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        -weight / unit.ln()
    };
    let draws = workers.map(|(at, id, weight)| (at, draw(id, weight)));
    draws.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))).map(|(at, _)| at)
}

/// A number that depends on all bits of another: finalisation of a 64-bit hash.
pub fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners(weights: &[f64]) -> Vec<usize> {
        let workers = || {
            weights
                .iter()
                .enumerate()
                .filter(|(_, weight)| **weight > 0.0)
                .map(|(at, weight)| (at, 1000 + at as u64, *weight))
        };
        let owner = |at: usize| owner(at / 256, (at % 256) as u32, workers()).unwrap();
        (0..75 * 256).map(owner).collect()
    }

    #[test]
    fn shares_are_as_the_weights() {
        let owners = owners(&[1.0, 2.0, 4.0]);
        for (worker, weight) in [1.0, 2.0, 4.0].into_iter().enumerate() {
            let share = owners.iter().filter(|owner| **owner == worker).count() as f64;
            let want = owners.len() as f64 * weight / 7.0;
            assert!((share - want).abs() < 0.1 * want, "{worker}: {share} of {want}");
        }
    }

    #[test]
    fn only_the_experts_of_a_worker_that_goes_move() {
        let (before, after) = (owners(&[1.0, 2.0, 4.0]), owners(&[1.0, 0.0, 4.0]));
        for (before, after) in before.iter().zip(&after) {
            assert!(before == after || *before == 1);
        }
        assert_eq!(owner(1, 2, std::iter::empty()), None);
    }

    #[test]
    fn spans_name_their_first_and_last() {
        assert_eq!(parse_span("3-7"), Ok(3..8));
        assert_eq!(parse_span("5"), Ok(5..6));
        for bad in ["", "-", "7-3", "-3", "a-b", "1-2-3", "1..2", "99999999999"] {
            assert!(parse_span(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rules_are_read_strictly() {
        let rule: Rule = "layers 3-5,experts 0-31=10.0.0.7:9100".parse().unwrap();
        assert!(rule.covers(3, 0) && rule.covers(5, 31));
        assert!(!rule.covers(2, 0) && !rule.covers(6, 0) && !rule.covers(4, 32));
        let rule: Rule = "layers 7=local".parse().unwrap();
        assert!(rule.covers(7, 4000) && rule.place == "local");
        for bad in [
            "",
            "layers 3",
            "layers =a",
            "layers 5-3=a",
            "experts 1=a",
            "layers 1,2=a",
            "layers 1=",
            "layers 1,experts x=a",
        ] {
            assert!(bad.parse::<Rule>().is_err(), "{bad}");
        }
    }
}
