//! Rule 7: the k best scores. A higher score comes first, compared as IEEE numbers; ties go to
//! the lower index. Scores must be finite.

use std::cmp::Ordering;

#[inline]
fn better(scores: &[f32], a: u32, b: u32) -> Ordering {
    let (score_a, score_b) = (scores[a as usize], scores[b as usize]);
    score_b.partial_cmp(&score_a).unwrap_or(Ordering::Equal).then(a.cmp(&b))
}

/// Brings the `k` best of `candidates` to its front, in any order, and returns them.
pub fn select<'a>(scores: &[f32], candidates: &'a mut [u32], k: usize) -> &'a mut [u32] {
    if k == 0 {
        return &mut [];
    }
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, |&a, &b| better(scores, a, b));
    }
    let kept = k.min(candidates.len());
    &mut candidates[..kept]
}

/// Indices of the `k` best of `candidates`, best first.
pub fn top_k_of(scores: &[f32], mut candidates: Vec<u32>, k: usize) -> Vec<u32> {
    let kept = select(scores, &mut candidates, k).len();
    candidates.truncate(kept);
    candidates.sort_unstable_by(|&a, &b| better(scores, a, b));
    candidates
}

/// Indices of the `k` best scores, best first.
pub fn top_k(scores: &[f32], k: usize) -> Vec<u32> {
    top_k_of(scores, (0..scores.len() as u32).collect(), k)
}

/// Fills `best` with the best of `candidates`, which come in ascending order, best first, and
/// returns how many there are. For few; it compares every candidate with the worst kept.
pub fn best_of(
    scores: &[f32],
    candidates: impl IntoIterator<Item = u32>,
    best: &mut [u32],
) -> usize {
    let mut count = 0;
    for candidate in candidates {
        let score = scores[candidate as usize];
        let rank = best[..count].partition_point(|&kept| scores[kept as usize] >= score);
        if rank == best.len() {
            continue;
        }
        count = (count + 1).min(best.len());
        best[rank..count].rotate_right(1);
        best[rank] = candidate;
    }
    count
}

/// Index of the best score; 0 for an empty slice.
pub fn argmax(scores: &[f32]) -> u32 {
    let mut best = 0;
    for (index, score) in scores.iter().enumerate() {
        if *score > scores[best] {
            best = index;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_index_and_signed_zeros_are_equal() {
        let scores = [0.0, 2.0, -0.0, 2.0, 1.0, 0.0];
        assert_eq!(top_k(&scores, 4), [1, 3, 4, 0]);
        assert_eq!(top_k(&scores, 6), [1, 3, 4, 0, 2, 5]);
        assert_eq!(top_k(&[-0.0, 0.0], 1), [0]);
        assert_eq!(argmax(&scores), 1);
        assert_eq!(argmax(&[-0.0, 0.0]), 0);
    }

    #[test]
    fn the_best_few_are_those_of_the_full_order() {
        let scores: Vec<f32> = (0..200).map(|i| ((i * 7919 % 37) as f32 - 18.0) * 0.5).collect();
        for k in [1, 2, 8, 64, 200, 250] {
            let mut best = vec![0; k];
            let count = best_of(&scores, 0..200, &mut best);
            assert_eq!(best[..count], top_k(&scores, k)[..]);
        }
        let some = [3, 50, 51, 120];
        let mut best = [0; 3];
        assert_eq!(best_of(&scores, some, &mut best), 3);
        assert_eq!(best.to_vec(), top_k_of(&scores, some.to_vec(), 3));
        assert_eq!(best_of(&scores, some, &mut []), 0);
    }

    #[test]
    fn only_candidates_are_chosen() {
        assert_eq!(top_k_of(&[9.0, 1.0, 5.0, 7.0], vec![1, 2], 5), [2, 1]);
        assert!(top_k(&[1.0], 0).is_empty());
    }
}
