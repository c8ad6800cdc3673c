//! The plots of a report, as SVG with the colours of the surrounding page.

use anyhow::{Result, anyhow};
use manylane_measure::format_number;
use plotters::coord::Shift;
use plotters::prelude::*;

/// Width of every plot in its own units; the page scales it.
const WIDTH: u32 = 860;
const HEIGHT: u32 = 380;
/// Size of labels.
const FONT_SIZE: u32 = 15;

/// Top of the axis, as a multiple of the highest median.
const HEADROOM: f64 = 4.0;

/// Placeholders for colours of the page. No plot uses these values for anything else.
const INK: RGBColor = RGBColor(1, 2, 3);
const FAINT: RGBColor = RGBColor(4, 5, 6);
/// Number of distinguishable series.
pub(super) const COLOURS: usize = 12;

/// The placeholder for the colour of a series.
fn series_colour(number: usize) -> RGBColor {
    RGBColor(16, 0, (number % COLOURS) as u8 + 1)
}

/// One line or one set of bars.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its colour. A receiver has the same one in all plots.
    pub colour: usize,
    /// A value for each place on the axis; `None` if it was not measured.
    pub values: Vec<Option<f64>>,
    /// Raw samples at each place.
    pub samples: Vec<Vec<f64>>,
    /// True for published numbers, which are drawn dashed, with hollow bars.
    pub printed: bool,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Lines over the places `labels`, with the samples as faint dots around each median.
pub(super) fn lines(labels: &[String], x: &str, y: &str, series: &[Series]) -> Result<String> {
    draw(HEIGHT, |area| {
        let values = || series.iter().flat_map(|line| line.values.iter().flatten());
        let samples = || series.iter().flat_map(|line| line.samples.iter().flatten());
        // A few samples far above all medians would flatten the plot, so that they are drawn at
        // the edge, with their values.
        let (highest, top) = (axis_max(values().chain(samples())), axis_max(values()) * HEADROOM);
        let is_cut = values().any(|value| *value > 0.0) && highest > top;
        let top = if is_cut { top } else { highest };
        let mut chart = frame(area, labels.len(), top)?;
        mesh(&mut chart, labels, x, y)?;
        for (index, line) in series.iter().enumerate() {
            let colour = series_colour(line.colour);
            // Side by side, so that receivers of equal cost do not hide each other's samples.
            let aside = (index as f64 - (series.len() as f64 - 1.0) / 2.0) * 0.035;
            let dots =
                line.samples.iter().enumerate().flat_map(|(place, samples)| {
                    samples.iter().map(move |value| (place as f64 + aside, *value))
                });
            let (above, dots): (Vec<_>, Vec<_>) = dots.partition(|at| at.1 > top);
            let faint = colour.mix(0.45).filled();
            chart.draw_series(dots.into_iter().map(|at| Circle::new(at, 2, faint))).map_err(plot_error)?;
            let edge = above.into_iter().map(|at| TriangleMarker::new((at.0, top * 0.99), 5, faint));
            chart.draw_series(edge).map_err(plot_error)?;
            let at = |(place, value): (usize, &Option<f64>)| Some((place as f64 + aside, (*value)?));
            let points: Vec<(f64, f64)> = line.values.iter().enumerate().filter_map(at).collect();
            let (stroke, mark) =
                (colour.stroke_width(2), |at: &(f64, f64)| Circle::new(*at, 4, shape_style(line, colour)));
            // Lines are interrupted at places without a value.
            for points in points.chunk_by(|one, next| next.0 - one.0 < 1.5) {
                if line.printed {
                    let dashes = DashedLineSeries::new(points.to_vec(), 7, 5, stroke);
                    chart.draw_series(dashes).map_err(plot_error)?;
                } else {
                    chart.draw_series(LineSeries::new(points.to_vec(), stroke)).map_err(plot_error)?;
                }
            }
            chart.draw_series(points.iter().map(mark)).map_err(plot_error)?;
        }
        if is_cut {
            let max = samples().copied().filter(|value| value.is_finite()).fold(0.0, f64::max);
            let style = ("sans-serif", FONT_SIZE - 2).into_font().color(&INK);
            let place = (WIDTH as i32 - 190, 2);
            area.draw(&Text::new(format!("▲ higher, up to {}", format_number(max)), place, style))
                .map_err(plot_error)?;
        }
        Ok(())
    })
}

/// Style of marks and bars of a series; published numbers are hollow.
fn shape_style(series: &Series, colour: RGBColor) -> ShapeStyle {
    if series.printed { colour.stroke_width(2) } else { colour.filled() }
}

/// A group of bars for each of `labels`, each with an optional second, outlined value.
pub(super) fn bars(
    labels: &[String],
    x: &str,
    y: &str,
    series: &[Series],
    outlined: &[Series],
) -> Result<String> {
    draw(HEIGHT, |area| {
        let all = series.iter().chain(outlined).flat_map(|bar| bar.values.iter().flatten());
        let mut chart = frame(area, labels.len(), axis_max(all))?;
        mesh(&mut chart, labels, x, y)?;
        let width = 0.8 / series.len().max(1) as f64;
        for (index, bar) in series.iter().enumerate() {
            let colour = series_colour(bar.colour);
            let left = |place: usize| place as f64 - 0.4 + index as f64 * width;
            let filled = bar.values.iter().enumerate().filter_map(|(place, value)| {
                Some(Rectangle::new(
                    [(left(place), 0.0), (left(place) + width * 0.9, (*value)?)],
                    shape_style(bar, colour),
                ))
            });
            chart.draw_series(filled).map_err(plot_error)?;
            let Some(outline) = outlined.get(index) else { continue };
            let lines = outline.values.iter().enumerate().filter_map(|(place, value)| {
                let (from, to, value) = (left(place), left(place) + width * 0.9, (*value)?);
                Some(PathElement::new([(from, value), (to, value)], INK.stroke_width(3)))
            });
            chart.draw_series(lines).map_err(plot_error)?;
        }
        Ok(())
    })
}

/// A row of bars for each of `labels`, which may be long: names are on the left, and each bar ends
/// with its figure.
pub(super) fn horizontal_bars(labels: &[String], x: &str, series: &[Series]) -> Result<String> {
    let height = 56 + (labels.len() * (12 + 16 * series.len().max(1))) as u32;
    let longest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
    // A letter is at most 0.6 times as wide as it is high.
    let names = (longest * FONT_SIZE as usize * 3 / 5 + 14).min(WIDTH as usize / 2) as u32;
    draw(height, |area| {
        // The figure after the longest bar needs room.
        let top = axis_max(series.iter().flat_map(|bar| bar.values.iter().flatten())) * 1.1;
        let places = labels.len();
        let mut builder = ChartBuilder::on(area);
        builder.margin(8).x_label_area_size(48).y_label_area_size(names);
        // The first one is at the top.
        let down = -(places.max(1) as f64 - 0.5)..0.5;
        let mut chart = builder.build_cartesian_2d(0.0..top, down).map_err(plot_error)?;
        let text = ("sans-serif", FONT_SIZE).into_font().color(&INK);
        chart
            .configure_mesh()
            .disable_y_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(FAINT)
            .axis_style(FAINT)
            .x_labels(6)
            .y_labels(places * 2 + 1)
            .x_label_formatter(&|value| format_number(*value))
            .y_label_formatter(&|at| label_at(labels, -*at))
            .x_desc(x)
            .label_style(text.clone())
            .axis_desc_style(text.clone())
            .draw()
            .map_err(plot_error)?;
        let width = 0.8 / series.len().max(1) as f64;
        for (index, bar) in series.iter().enumerate() {
            let colour = series_colour(bar.colour);
            let there =
                || bar.values.iter().enumerate().filter_map(|(place, value)| Some((place, (*value)?)));
            let above = |place: usize| 0.4 - place as f64 - index as f64 * width;
            let bars = there().map(|(place, value)| {
                let corners = [(0.0, above(place)), (value, above(place) - width * 0.9)];
                Rectangle::new(corners, shape_style(bar, colour))
            });
            chart.draw_series(bars).map_err(plot_error)?;
            let figures = there().map(|(place, value)| {
                let at = EmptyElement::at((value, above(place) - width * 0.45));
                at + Text::new(
                    format_number(value),
                    (5, -7),
                    ("sans-serif", FONT_SIZE - 2).into_font().color(&INK),
                )
            });
            chart.draw_series(figures).map_err(plot_error)?;
        }
        Ok(())
    })
}

/// The name of a place. The axis also requests labels between the places and outside, which have
/// none.
fn label_at(labels: &[String], at: f64) -> String {
    let place = at.round();
    if (at - place).abs() > 0.01 || place < 0.0 {
        return String::new();
    }
    labels.get(place as usize).cloned().unwrap_or_default()
}

type Chart<'a, 'b> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>,
>;

fn frame<'a, 'b>(area: &'a Area<'b>, places: usize, top: f64) -> Result<Chart<'a, 'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.margin(8).x_label_area_size(48).y_label_area_size(78);
    builder.build_cartesian_2d(-0.5..places as f64 - 0.5, 0.0..top).map_err(plot_error)
}

/// Long names of many places must not overlap.
fn label_size(labels: &[String]) -> u32 {
    let longest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
    // A letter is at most 0.6 times as wide as it is high. The axis has the plot's width minus the
    // numbers.
    let room = (WIDTH - 94) as usize * 5 / (3 * longest * labels.len()).max(1);
    u32::try_from(room).unwrap_or(FONT_SIZE).clamp(9, FONT_SIZE)
}

fn mesh(chart: &mut Chart<'_, '_>, labels: &[String], x: &str, y: &str) -> Result<()> {
    let text = ("sans-serif", FONT_SIZE).into_font().color(&INK);
    let below = ("sans-serif", label_size(labels)).into_font().color(&INK);
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(FAINT)
        .axis_style(FAINT)
        .x_labels(labels.len() * 2 + 1)
        .x_label_formatter(&|at| label_at(labels, *at))
        .y_label_formatter(&|value| format_number(*value))
        .y_labels(6)
        .x_desc(x)
        .y_desc(y)
        .label_style(text.clone())
        .x_label_style(below)
        .axis_desc_style(text)
        .draw()
        .map_err(plot_error)
}

fn draw(height: u32, paint: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        paint(&area)?;
        area.present().map_err(plot_error)?;
    }
    Ok(apply_theme(&svg, height))
}

/// Makes the plot scale with the page and use the page's colours.
fn apply_theme(svg: &str, height: u32) -> String {
    let fixed = format!("<svg width=\"{WIDTH}\" height=\"{height}\" ");
    let mut svg = svg.replace(&fixed, "<svg role=\"img\" ");
    for number in 0..COLOURS {
        svg = svg.replace(&hex(series_colour(number)), &format!("var(--s{number})"));
    }
    svg.replace(&hex(INK), "var(--ink)").replace(&hex(FAINT), "var(--faint)")
}

fn hex(colour: RGBColor) -> String {
    format!("#{:02X}{:02X}{:02X}", colour.0, colour.1, colour.2)
}

fn axis_max<'a>(values: impl Iterator<Item = &'a f64>) -> f64 {
    let max = values.copied().filter(|value| value.is_finite()).fold(0.0, f64::max);
    if max > 0.0 { max * 1.08 } else { 1.0 }
}

#[allow(clippy::needless_pass_by_value, reason = "used as a function for map_err")]
fn plot_error(err: impl std::fmt::Debug) -> anyhow::Error {
    anyhow!("cannot draw a plot: {err:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_smaller_and_short_ones_as_all_text() {
        let names = |name: &str, count: usize| vec![name.to_owned(); count];
        assert_eq!(label_size(&names("8", 4)), FONT_SIZE);
        assert_eq!(label_size(&[]), FONT_SIZE);
        let size = label_size(&names("receiver-link", 9));
        assert!(size < FONT_SIZE && (size * 13 * 9) as f64 * 0.6 <= f64::from(WIDTH - 94), "{size}");
        assert_eq!(label_size(&names("receiver-link", 90)), 9);
    }

    #[test]
    fn a_plot_scales_and_has_the_colours_of_the_page() {
        let series = [
            Series {
                colour: 0,
                values: vec![Some(1.0), None],
                samples: vec![vec![1.0, 2.0], vec![]],
                ..Series::default()
            },
            Series {
                colour: 1,
                values: vec![Some(3.0), Some(4.0)],
                samples: vec![vec![], vec![4.0]],
                printed: true,
                ..Series::default()
            },
        ];
        let labels = ["1".to_owned(), "2".to_owned()];
        for svg in [
            lines(&labels, "threads", "ns", &series).unwrap(),
            bars(&labels, "threads", "rate", &series, &series).unwrap(),
            horizontal_bars(&labels, "rate", &series).unwrap(),
        ] {
            assert!(svg.starts_with("<svg role=\"img\" viewBox="), "{}", &svg[..80]);
            assert!(svg.contains("var(--ink)") && svg.contains("var(--s0)") && svg.contains("var(--s1)"));
            assert!(!svg.contains("#100001") && !svg.contains("#010203"));
        }
    }

    #[test]
    fn published_figures_are_dashed_and_hollow() {
        let labels = ["1".to_owned(), "2".to_owned()];
        let series = |printed| {
            let values = vec![Some(3.0), Some(4.0)];
            [Series { colour: 11, values, printed, ..Series::default() }]
        };
        let both = |draw: &dyn Fn(&[Series]) -> String| [false, true].map(|printed| draw(&series(printed)));
        let [ours, theirs] = both(&|series| lines(&labels, "threads", "ns", series).unwrap());
        assert!(theirs.matches("<polyline").count() > ours.matches("<polyline").count(), "{theirs}");
        let bars = both(&|series| bars(&labels, "threads", "ns", series, &[]).unwrap());
        for [ours, theirs] in [[ours, theirs], bars] {
            assert!(
                ours.contains("fill=\"var(--s11)\"") && !theirs.contains("fill=\"var(--s11)\""),
                "{theirs}"
            );
            assert!(theirs.contains("stroke=\"var(--s11)\""), "{theirs}");
        }
    }

    #[test]
    fn bar_rows_show_each_name_and_value() {
        let names: Vec<String> =
            (0..9).map(|at| format!("a long name that has no room below, {at}")).collect();
        let values = |times: f64| (0..9).map(|at| Some(100.0 + times * f64::from(at))).collect::<Vec<_>>();
        let series = |colour, values, printed| Series { colour, values, printed, ..Series::default() };
        let svg =
            horizontal_bars(&names, "ns", &[series(0, values(1.0), false), series(0, values(17.0), true)])
                .unwrap();
        for (at, name) in names.iter().enumerate() {
            for text in [name.clone(), (100 + at).to_string(), (100 + 17 * at).to_string()] {
                assert!(svg.lines().any(|line| line.trim() == text), "{text} is not in\n{svg}");
            }
        }
        let height = |svg: &str| {
            svg.split(['"', ' ']).skip_while(|word| *word != "860").nth(1).unwrap().parse::<u32>().unwrap()
        };
        let one = horizontal_bars(&names[..1], "ns", &[series(0, vec![Some(1.0)], false)]).unwrap();
        assert!(height(&svg) > 3 * height(&one), "{} {}", &svg[..80], &one[..80]);
    }

    #[test]
    fn outliers_are_noted_and_do_not_compress_the_plot() {
        let labels = ["1".to_owned(), "2".to_owned(), "3".to_owned()];
        let with = |sample, middle| {
            let values = vec![Some(10.0), middle, Some(12.0)];
            let samples = vec![vec![10.0, sample], vec![], vec![12.0]];
            lines(&labels, "x", "ns", &[Series { values, samples, ..Series::default() }]).unwrap()
        };
        let (near, far) = (with(47.0, Some(11.0)), with(30_000.0, Some(11.0)));
        assert!(!near.contains("higher") && !near.contains("<polygon"), "{near}");
        assert!(far.contains("▲ higher, up to 30k") && far.matches("<polygon").count() == 1, "{far}");
        // A line ends at a place without a value, and another one begins after it.
        let strokes =
            |svg: &str| svg.lines().filter(|line| line.contains("polyline") && line.contains("--s0")).count();
        assert_eq!((strokes(&near), strokes(&with(47.0, None))), (1, 2));
    }

    #[test]
    fn no_samples_give_an_empty_plot() {
        assert!(lines(&[], "threads", "ns", &[]).is_ok());
        assert!(bars(&["1".into()], "threads", "ns", &[], &[]).is_ok());
        assert!(horizontal_bars(&["1".into()], "ns", &[]).is_ok() && horizontal_bars(&[], "ns", &[]).is_ok());
    }
}
