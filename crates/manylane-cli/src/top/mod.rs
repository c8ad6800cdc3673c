//! `manylane top`: shows the lanes of running processes.
//!
//! ```text
//!  control sockets of processes (manylane::control), /proc ─► snapshot.rs ─► view.rs (rates between two) ─► draw.rs, a table, JSON
//!                                             prometheus.rs ┘
//! ```

mod draw;
pub(crate) mod prometheus;
mod snapshot;
mod tcp;
mod view;

use std::io::{self, IsTerminal};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use manylane_measure::Document;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde::Serialize;

use self::draw::Screen;
use self::snapshot::Snapshot;
use self::view::View;
use crate::args::TopArgs;
use crate::output::{self, UsageError};

/// Name of the document.
const SCHEMA: &str = "manylane.top.v1";

const NO_TERMINAL: &str = "cannot use the terminal: use --once to print a table";

/// Rates over less time mean nothing.
const INTERVAL_MIN: Duration = Duration::from_millis(50);

/// Shows lanes until a key ends it, or once.
pub(crate) fn run(args: &TopArgs) -> Result<()> {
    let interval = args.interval.max(INTERVAL_MIN);
    if args.once || args.json {
        return run_once(args, interval);
    }
    if !io::stdout().is_terminal() {
        return Err(
            UsageError("standard output is no terminal: use --once for a table, or --json".into()).into()
        );
    }
    let first = Snapshot::collect(args.pid)?;
    let mut terminal = ratatui::try_init().context(NO_TERMINAL)?;
    let outcome = run_live(&mut terminal, args, interval, first);
    ratatui::restore();
    outcome
}

fn run_once(args: &TopArgs, interval: Duration) -> Result<()> {
    let before = Snapshot::collect(args.pid)?;
    thread::sleep(interval);
    let now = Snapshot::collect(args.pid)?;
    let mut view = diff(&before, &now, interval);
    if !args.json {
        return output::print(&view.text(args.rows));
    }
    let rows = std::mem::take(&mut view.rows);
    let settings = Settings { command: output::command_line(), view };
    output::print_json(&Document::new(SCHEMA, settings, rows))
}

fn diff(before: &Snapshot, now: &Snapshot, interval: Duration) -> View {
    let times = now.at.zip(before.at).map(|(now, before)| now - before);
    View::from_snapshots(before, now, times.unwrap_or(interval).max(INTERVAL_MIN).as_secs_f64())
}

/// Samples and draws until a key ends it.
fn run_live(
    terminal: &mut ratatui::DefaultTerminal,
    args: &TopArgs,
    interval: Duration,
    mut last: Snapshot,
) -> Result<()> {
    let broken = NO_TERMINAL;
    let (mut screen, mut view) = (Screen::default(), View::from_snapshots(&last, &last, 1.0));
    let mut due = Instant::now() + INTERVAL_MIN;
    loop {
        terminal.draw(|frame| screen.draw(frame, &view)).context(broken)?;
        // When the terminal's size changes, it is drawn again, as after a key.
        if event::poll(due.saturating_duration_since(Instant::now())).context(broken)? {
            if let Event::Key(key) = event::read().context(broken)?
                && key.kind == KeyEventKind::Press
            {
                let is_interrupt =
                    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                match key.code {
                    KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                    _ if is_interrupt => return Ok(()),
                    KeyCode::Up | KeyCode::Char('k') => screen.step(-1, view.rows.len()),
                    KeyCode::Down | KeyCode::Char('j') => screen.step(1, view.rows.len()),
                    KeyCode::Char(' ') => screen.is_paused = !screen.is_paused,
                    KeyCode::Char('s') => {
                        screen.sort = screen.sort.next();
                        view.sort(screen.sort);
                    }
                    _ => {}
                }
            }
            continue;
        }
        due = Instant::now() + interval;
        if screen.is_paused {
            continue;
        }
        let now = match Snapshot::collect(args.pid) {
            Ok(now) => now,
            // The requested process has ended.
            Err(_) if args.pid.is_some() => Snapshot { at: Some(Instant::now()), ..Snapshot::default() },
            Err(err) => return Err(err),
        };
        view = diff(&last, &now, interval);
        view.sort(screen.sort);
        last = now;
    }
}

/// Settings of the sample, and values that do not belong to a lane.
#[derive(Debug, Serialize)]
struct Settings {
    command: String,
    #[serde(flatten)]
    view: View,
}
