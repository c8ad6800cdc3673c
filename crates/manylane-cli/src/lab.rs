//! `manylane lab`: runs the experiments of papers, shows their tables, writes the report.

use std::sync::atomic::Ordering;

use anyhow::{Result, bail};
use manylane_lab::state::State;
use manylane_lab::{self as lab, LabDocument, LabSettings, Paper, Scale, report, table};

use crate::args::{LabArgs, LabPaper};
use crate::bench::{Bar, write};
use crate::output::{self, UsageError};
use crate::progress::Progress;

/// Runs the lab.
pub(crate) fn run(args: &LabArgs) -> Result<()> {
    let papers = match args.paper {
        LabPaper::List => return list(),
        LabPaper::Rivera => vec![Paper::Rivera],
        LabPaper::Sarma => vec![Paper::Sarma],
        LabPaper::Orlowsky => vec![Paper::Orlowsky],
        LabPaper::Priambodo => vec![Paper::Priambodo],
        LabPaper::Salesforce => vec![Paper::Salesforce],
        LabPaper::All => Paper::ALL.to_vec(),
    };
    let settings = LabSettings::new(output::command_line(), &papers, args.parts.clone(), scale(args));
    let parts = settings.selected_parts().map_err(|err| UsageError(err.to_string()))?;
    if args.list {
        let names: Vec<String> = parts.into_iter().map(|(_, part)| part.id + "\n").collect();
        return output::print(&names.concat());
    }
    output::create_folder(&args.out)?;
    let name = if args.paper == LabPaper::All { "all" } else { papers[0].name() };
    let mut state = match &args.resume {
        Some(path) => State::resume(path, output::open_existing(path)?, &settings)?,
        None => State::create(&args.out.join(format!("lab-{name}.state.jsonl")), settings)?,
    };
    if args.resume.is_some() {
        let again = match state.failed_parts() {
            0 => String::new(),
            failed => format!(", {failed} failed and run again"),
        };
        output::eprint_line(&format!("{} parts are already done{again}", state.done_parts()));
    }
    let finished = run_parts(&mut state, args)?;
    let json = write(&args.out, &format!("lab-{name}.json"), &output::json(&finished)?)?;
    let page = write(&args.out, &format!("lab-{name}.html"), &report::html(&finished)?)?;
    output::eprint_line(&format!(
        "report: {page} (raw samples: {json}); the parts took {:.0} s",
        state.seconds()
    ));
    if args.json { output::print_json(&finished) } else { output::print(&text(&finished)) }
}

fn scale(args: &LabArgs) -> Scale {
    let usual = if args.quick { Scale::quick() } else { Scale::full() };
    let millis = |time: Option<std::time::Duration>, usual: u64| {
        time.map_or(usual, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1))
    };
    Scale {
        rounds: args.rounds.unwrap_or(usual.rounds),
        units: args.units.unwrap_or(usual.units),
        flood_ms: millis(args.flood_duration, usual.flood_ms),
        sample_ms: millis(args.duration, usual.sample_ms),
        ..usual
    }
}

/// Runs the parts. After an interruption, the others can be run later.
fn run_parts(state: &mut State, args: &LabArgs) -> Result<LabDocument> {
    let mut controller = Bar::new()?;
    let done = lab::run(state, &mut controller);
    controller.progress = Progress::bar();
    match done {
        Err(_) if controller.stop.load(Ordering::Relaxed) => {
            let all = state.settings().selected_parts()?.len();
            bail!(
                "stopped: {} of {all} parts are done and saved; to continue, repeat the command with --resume {}{}",
                state.done_parts(),
                state.path().display(),
                if args.json { " (the result is printed at the end)" } else { "" }
            )
        }
        done => done,
    }
}

/// The whole result as plain text.
fn text(run: &LabDocument) -> String {
    let machine = &run.machine;
    let mut text = format!("{} × {}, Linux {}\n", machine.cpus, machine.model, machine.kernel);
    text += &format!("{}\n", run.settings.scale.describe());
    for &paper in &run.settings.papers {
        text += &format!("\n{paper}\n{}\n\n", paper.title());
        text += &table::format_tables(paper, &run.settings.scale, &run.rows);
        text += "\nDifferences from the paper:\n";
        for sentence in paper.differences(&run.settings.scale) {
            text += &format!("- {sentence}\n");
        }
    }
    text
}

fn list() -> Result<()> {
    let mut text = String::new();
    for paper in Paper::ALL {
        text += &format!("{:<12}{}\n", paper.name(), paper.title());
    }
    output::print(&text)
}
