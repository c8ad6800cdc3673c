//! Statistics of samples: medians with their spread, never a single run.

/// Summary of a set of samples: median and spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// The middle sample, or the mean of the two in the middle.
    pub median: f64,
    /// A quarter of the samples is at most this.
    pub lower_quartile: f64,
    /// Three quarters of the samples are at most this.
    pub upper_quartile: f64,
}

impl Summary {
    /// Summarizes the finite samples; `None` if there is none.
    pub fn from_samples(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.into_iter().filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        (!sorted.is_empty()).then(|| Self {
            median: quantile(&sorted, 0.5),
            lower_quartile: quantile(&sorted, 0.25),
            upper_quartile: quantile(&sorted, 0.75),
        })
    }
}

/// The median of the finite samples; 0 if there is none, which no measured figure can be.
pub fn median(samples: impl IntoIterator<Item = f64>) -> f64 {
    Summary::from_samples(samples).map_or(0.0, |summary| summary.median)
}

/// The median of the finite samples; `None` if there is none.
#[must_use]
pub fn median_of(samples: &[f64]) -> Option<f64> {
    Summary::from_samples(samples.iter().copied()).map(|summary| summary.median)
}

/// The ratio of the median of `samples` to that of `base`, with the p-value of the difference:
/// `0.50 (0.008)`. A dash without samples on either side.
#[must_use]
pub fn format_ratio(samples: &[f64], base: &[f64]) -> String {
    match (median_of(samples), median_of(base)) {
        (Some(median), Some(of)) if of != 0.0 => {
            let p = mann_whitney(samples, base);
            format!("{:.2} ({p:.*})", median / of, if p < 0.1 { 3 } else { 2 })
        }
        _ => "–".into(),
    }
}

/// The quartiles of the finite samples, `401–403`, with `digits` after the point.
#[must_use]
pub fn format_quartiles(samples: impl IntoIterator<Item = f64>, digits: usize) -> String {
    Summary::from_samples(samples).map_or_else(
        || "–".into(),
        |all| format!("{:.digits$}–{:.digits$}", all.lower_quartile, all.upper_quartile),
    )
}

/// The quantile `at`, with linear interpolation. `sorted` must be in rising order and not empty.
fn quantile(sorted: &[f64], at: f64) -> f64 {
    let position = at * (sorted.len() - 1) as f64;
    let below = position.floor() as usize;
    let above = position.ceil() as usize;
    sorted[below] + (sorted[above] - sorted[below]) * (position - below as f64)
}

/// The two-sided p-value of the Mann-Whitney test for the difference of two sets of samples, which
/// assumes nothing about the distribution of timings.
///
/// Exact for up to 10 samples a side without ties (the usual case of 5 rounds), otherwise by the
/// normal approximation. 1 if either side is empty.
pub fn mann_whitney(a: &[f64], b: &[f64]) -> f64 {
    if a.is_empty() || b.is_empty() {
        return 1.0;
    }
    let mut u = 0.0_f64;
    for x in a {
        for y in b {
            u += match x.total_cmp(y) {
                std::cmp::Ordering::Greater => 1.0,
                std::cmp::Ordering::Equal => 0.5,
                std::cmp::Ordering::Less => 0.0,
            };
        }
    }
    let (n, m) = (a.len(), b.len());
    let u = u.min((n * m) as f64 - u);
    if n <= 10 && m <= 10 { exact_p(n, m, u.floor() as usize) } else { normal_p(n, m, u) }
}

/// Twice the share of all orderings of `n` and `m` samples whose U is at most `u`.
fn exact_p(n: usize, m: usize, u: usize) -> f64 {
    // ways[i][j][k]: orderings of i and j samples with U = k. The largest sample belongs to either
    // side, and then beats all or none of the other.
    let u_max = n * m;
    let mut ways = vec![vec![vec![0.0_f64; u_max + 1]; m + 1]; n + 1];
    for i in 0..=n {
        for j in 0..=m {
            for k in 0..=u_max {
                ways[i][j][k] = if i == 0 || j == 0 {
                    f64::from(u8::from(k == 0))
                } else {
                    let first = if k >= j { ways[i - 1][j][k - j] } else { 0.0 };
                    first + ways[i][j - 1][k]
                };
            }
        }
    }
    let all: f64 = ways[n][m].iter().sum();
    let tail: f64 = ways[n][m].iter().take(u + 1).sum();
    (2.0 * tail / all).min(1.0)
}

fn normal_p(n: usize, m: usize, u: f64) -> f64 {
    let (n, m) = (n as f64, m as f64);
    let deviation = (n * m * (n + m + 1.0) / 12.0).sqrt();
    let z = ((u - n * m / 2.0).abs() - 0.5).max(0.0) / deviation;
    // Abramowitz and Stegun 26.2.17: the error is below 1e-7, much less than needed here.
    let t = 1.0 / (1.0 + 0.231_641_9 * z);
    let poly = t
        * (0.319_381_530
            + t * (-0.356_563_782 + t * (1.781_477_937 + t * (-1.821_255_978 + t * 1.330_274_429))));
    (2.0 * (-z * z / 2.0).exp() / std::f64::consts::TAU.sqrt() * poly).min(1.0)
}

/// The order of `items` in each round, one list a round.
///
/// Each round starts with another item, so that none always runs after the same neighbour.
pub fn interleaved(rounds: usize, items: usize) -> impl Iterator<Item = Vec<usize>> {
    (0..rounds).map(move |round| (0..items).map(|at| (round + at) % items).collect())
}

/// Each value once, in the order of the first occurrences.
pub fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for value in values {
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_of_known_samples() {
        let summary = Summary::from_samples([5.0, 1.0, 4.0, 2.0, 3.0, f64::NAN]).unwrap();
        assert_eq!(summary.median, 3.0);
        assert_eq!((summary.lower_quartile, summary.upper_quartile), (2.0, 4.0));
        assert_eq!(median([1.0, 2.0]), 1.5);
        assert_eq!(Summary::from_samples([]), None);
        assert_eq!(median([]), 0.0);
    }

    #[test]
    fn a_ratio_has_the_p_value_of_its_samples() {
        let (low, high) = ([1., 2., 3., 4., 5.], [6., 7., 8., 9., 10.]);
        assert_eq!(format_ratio(&low, &high), "0.38 (0.008)");
        assert_eq!(format_ratio(&low, &low), "1.00 (1.00)");
        assert_eq!((format_ratio(&[], &low), format_ratio(&low, &[0.0])), ("–".into(), "–".into()));
        assert_eq!(format_quartiles(low, 1), "2.0–4.0");
    }

    #[test]
    fn every_item_runs_once_per_round_with_a_rotating_start() {
        let rounds: Vec<Vec<usize>> = interleaved(4, 3).collect();
        assert_eq!(rounds, [vec![0, 1, 2], vec![1, 2, 0], vec![2, 0, 1], vec![0, 1, 2]]);
        assert_eq!(interleaved(2, 0).collect::<Vec<_>>(), [vec![0_usize; 0], vec![]]);
    }

    #[test]
    fn the_test_of_difference_matches_the_tables() {
        // Five against five with no overlap: 2 / C(10, 5) = 2 / 252.
        let p = mann_whitney(&[1., 2., 3., 4., 5.], &[6., 7., 8., 9., 10.]);
        assert!((p - 2.0 / 252.0).abs() < 1e-12, "{p}");
        let p = mann_whitney(&[1., 3., 5., 7., 9.], &[2., 4., 6., 8., 10.]);
        assert!(p > 0.5, "{p}");
        assert_eq!(mann_whitney(&[], &[1.0]), 1.0);
        let low: Vec<f64> = (0..20).map(f64::from).collect();
        let high: Vec<f64> = (20..40).map(f64::from).collect();
        assert!(mann_whitney(&low, &high) < 1e-6);
        assert!(mann_whitney(&low, &low) > 0.9);
    }
}
