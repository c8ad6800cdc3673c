//! The terminal: the table, details of the selected lane, and the CPUs. It fits into 80 columns
//! and 24 lines.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row as Cells, Table, TableState, Wrap};

use super::view::{NO_LANES_MESSAGE, Sort, TABLE_HEADER, View};

/// The state that keys change.
#[derive(Debug, Default)]
pub(super) struct Screen {
    pub(super) table: TableState,
    pub(super) sort: Sort,
    pub(super) is_paused: bool,
}

/// Help on the keys, the longest text first.
const KEYS: [&str; 4] =
    ["q quit, s sort, ↑↓ select, space pause", "q quit, s sort, ↑↓ select", "q quit, ↑↓ select", "q quit"];
/// Column widths of the table: 72 in total, and a space between each two.
const COLUMN_WIDTHS: [u16; 8] = [15, 20, 4, 7, 7, 5, 7, 5];
/// Lines below the table: a title and four of text; a title and two for the CPUs.
const DETAILS_HEIGHT: u16 = 5;
const CPUS_HEIGHT: u16 = 3;

impl Screen {
    /// The next lane, or the one before.
    pub(super) fn step(&mut self, by: isize, rows: usize) {
        let at = self.table.selected().map_or(0, |at| at.saturating_add_signed(by));
        self.table.select((rows > 0).then_some(at.min(rows.saturating_sub(1))));
    }

    /// Draws the whole screen.
    pub(super) fn draw(&mut self, frame: &mut Frame<'_>, view: &View) {
        let parts = [
            Constraint::Length(1),
            Constraint::Min(3),
            Constraint::Length(DETAILS_HEIGHT),
            Constraint::Length(CPUS_HEIGHT),
        ];
        let [title, table, details, cpus] = Layout::vertical(parts).areas(frame.area());
        let mut processes: Vec<u32> = view.rows.iter().map(|row| row.pid).collect();
        processes.sort_unstable();
        processes.dedup();
        let state = if self.is_paused { "stopped" } else { self.sort.name() };
        let count =
            |count: usize, one: &str, many: &str| format!("{count} {}", if count == 1 { one } else { many });
        // The first line of the table is its header.
        let shown = usize::from(table.height.saturating_sub(1)).min(view.rows.len());
        let but = if shown < view.rows.len() { format!(" ({shown} shown)") } else { String::new() };
        let line = format!(
            "manylane top: {}, {}{but}, by {state}   ",
            count(processes.len(), "process", "processes"),
            count(view.rows.len(), "lane", "lanes")
        );
        // The most basic help comes first, in case there is no room for all.
        let room = usize::from(title.width).saturating_sub(line.chars().count());
        let keys = KEYS.iter().find(|keys| keys.chars().count() <= room).unwrap_or(&"");
        let line = line + keys;
        let bold = Style::default().add_modifier(Modifier::BOLD);
        frame.render_widget(Line::styled(line, bold), title);
        if view.rows.is_empty() {
            frame.render_widget(Paragraph::new(NO_LANES_MESSAGE).wrap(Wrap { trim: true }), table);
        } else {
            self.step(0, view.rows.len());
            self.draw_table(frame, table, view);
        }
        let (width, room) = (usize::from(details.width), usize::from(DETAILS_HEIGHT - 1));
        let text: Vec<Line<'_>> =
            fit_lines(self.details(view), width, room).into_iter().map(Line::from).collect();
        let titled = |title| Block::default().borders(Borders::TOP).title(title);
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }).block(titled("lost")), details);
        let line = view.fit_cpus(usize::from(cpus.width), usize::from(CPUS_HEIGHT - 1));
        let line = Paragraph::new(line).wrap(Wrap { trim: true });
        frame.render_widget(line.block(titled("softirq")), cpus);
    }

    fn draw_table(&mut self, frame: &mut Frame<'_>, area: ratatui::layout::Rect, view: &View) {
        let cells = |row: [String; 8]| {
            let pad = |(at, text): (usize, String)| match at {
                0 | 1 => Cell::from(shorten(&text, COLUMN_WIDTHS[at].into())),
                _ => Cell::from(format!("{text:>0$}", usize::from(COLUMN_WIDTHS[at]))),
            };
            Cells::new(row.into_iter().enumerate().map(pad).collect::<Vec<_>>())
        };
        let head = cells(TABLE_HEADER.map(String::from)).style(Style::default().add_modifier(Modifier::BOLD));
        let rows = view.rows.iter().map(|row| cells(row.cells()));
        let table = Table::new(rows, COLUMN_WIDTHS.map(Constraint::Length))
            .header(head)
            .row_highlight_style(Style::default().add_modifier(Modifier::REVERSED));
        frame.render_stateful_widget(table, area, &mut self.table);
    }

    /// Details of the selected lane, and the datagrams that filters dropped, first those of its
    /// socket.
    fn details(&self, view: &View) -> Vec<String> {
        let mut lines = Vec::new();
        let picked = self.table.selected().and_then(|at| view.rows.get(at));
        if let Some(row) = picked {
            let thread = row.thread.map_or_else(String::new, |tid| format!(", thread {tid}"));
            lines.push(format!(
                "{} lane {} ({}{thread}), since it was opened: {}",
                row.socket,
                row.lane,
                row.engine,
                row.losses()
            ));
            lines.extend(row.connections());
        }
        let of_sockets =
            view.ring_lines().into_iter().chain(view.filter_drops.iter().map(super::view::FilterRow::line));
        let (own, others): (Vec<String>, Vec<String>) = of_sockets
            .partition(|line| picked.is_some_and(|row| line.contains(&format!(" {}:", row.socket))));
        lines.extend(own);
        lines.extend(view.silent.iter().map(|silent| silent.why.clone()));
        lines.extend(others);
        lines
    }
}

/// The lines that fit when each is wrapped at `width`. If not all fit, the last line says so.
fn fit_lines(lines: Vec<String>, width: usize, room: usize) -> Vec<String> {
    let count = lines.len();
    let (mut kept, mut used) = (Vec::new(), 0);
    for line in lines {
        // Lines are wrapped between words, so that some columns stay empty.
        let height = line.chars().count().div_ceil((width * 7 / 8).max(1)).max(1);
        let is_last = kept.len() + 1 == count;
        if used + height + usize::from(!is_last) > room && !kept.is_empty() {
            let more = count - kept.len();
            kept.push(format!(
                "and {more} more {} (--once shows all)",
                if more == 1 { "line" } else { "lines" }
            ));
            break;
        }
        used += height;
        kept.push(line);
    }
    kept
}

/// Truncates at the start, because the port matters more than the first part of the address.
fn shorten(text: &str, room: usize) -> String {
    let len = text.chars().count();
    if len <= room {
        return text.into();
    }
    let is_address = text.ends_with(|c: char| c.is_ascii_digit()) && text.contains(':');
    if is_address {
        format!("…{}", text.chars().skip(len + 1 - room).collect::<String>())
    } else {
        format!("{}…", text.chars().take(room - 1).collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::view::tests::view;
    use super::*;

    fn drawn(screen: &mut Screen, view: &View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame, view)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol().to_owned()).collect::<String>();
        (0..height).map(line).map(|line| line.trim_end().to_owned()).collect()
    }

    #[test]
    fn it_fits_into_80_columns_and_24_lines() {
        let mut screen = Screen::default();
        let lines = drawn(&mut screen, &view(), 80, 24);
        let expected = [
            (0, "manylane top: 1 process, 2 lanes, by lane   q quit, s sort, ↑↓ select"),
            (1, "process         socket               lane    in/s   out/s queue  lost/s   cpu"),
            (2, "4242 echo       192.0.2.1:53            0    1000       0   25%      20   50%"),
            (3, "4242 echo       192.0.2.1:53            1       0       0   50%       0     -"),
            (16, "lost"),
            (17, "192.0.2.1:53 lane 0 (xdp), since it was opened: kernel_dropped 40"),
            (18, "rings of 192.0.2.1:53: 2, fullest eth0 queue 1 25%, dropped 80 (40/s)"),
            (19, "filter of 192.0.2.1:53: denied 0 (0/s), over a limit 2500 (1000/s)"),
            (21, "softirq"),
            (22, "CPU 0 50%, CPU 1 0%"),
        ];
        for (at, text) in expected {
            assert!(
                lines[at].trim_end_matches('─') == text,
                "line {at} is {:?}, not {text:?}\n{lines:#?}",
                lines[at]
            );
        }
    }

    #[test]
    fn lanes_are_picked_and_any_size_will_do() {
        let (mut screen, view) = (Screen::default(), view());
        for (by, lane) in [(1, "lane 0"), (1, "lane 1"), (1, "lane 1"), (-1, "lane 0"), (-5, "lane 0")] {
            screen.step(by, view.rows.len());
            let lines = drawn(&mut screen, &view, 80, 24);
            assert!(lines[17].contains(lane), "{lane}: {}", lines[17]);
        }
        for (width, height) in [(1, 1), (10, 3), (40, 10), (79, 23), (200, 60)] {
            drawn(&mut screen, &view, width, height);
        }
        // When a process ends, its selected lane is gone.
        screen.step(5, 2);
        let lines = drawn(&mut screen, &View::default(), 80, 24);
        assert!(lines[1].starts_with("no process with lanes") && !lines[17].contains("lane 1"), "{lines:#?}");
    }

    #[test]
    fn omitted_rows_are_named_and_the_selected_lanes_come_first() {
        let (mut screen, mut view) = (Screen::default(), view());
        let other = |socket: &str, row: &super::super::view::Row| super::super::view::Row {
            socket: socket.into(),
            ..row.clone()
        };
        for at in 0..30 {
            view.rows.push(other(&format!("192.0.2.9:{at}"), &view.rows[0]));
        }
        let drops = view.filter_drops[0].clone();
        for at in 0..5 {
            let socket = format!("192.0.2.9:{at}");
            view.filter_drops.insert(0, super::super::view::FilterRow { socket, ..drops.clone() });
        }
        for cpu in 2..40 {
            view.cpus.push(super::super::view::CpuRow { cpu, softirq: f64::from(cpu) / 100.0, busy: 1.0 });
        }
        let lines = drawn(&mut screen, &view, 80, 24);
        assert!(lines[0].starts_with("manylane top: 1 process, 32 lanes (14 shown), by lane"), "{lines:#?}");
        assert!(
            lines[18].starts_with("rings of 192.0.2.1:53")
                && lines[19].starts_with("filter of 192.0.2.1:53:"),
            "{lines:#?}"
        );
        assert_eq!(lines[20], "and 5 more lines (--once shows all)");
        // The busiest CPUs, if there is no room for all.
        assert!(lines[22].starts_with("CPU 0 50%, CPU 39 39%, CPU 38 38%"), "{lines:#?}");
        assert!(lines[23].ends_with("and 31 more, max 31%"), "{lines:#?}");
    }

    #[test]
    fn long_text_is_shortened_to_its_most_specific_part() {
        assert_eq!(shorten("[2001:db8::1]:5353", 10), "…::1]:5353");
        assert_eq!(shorten("4242 a-long-name", 8), "4242 a-…");
        assert_eq!(shorten("short", 5), "short");
    }
}
