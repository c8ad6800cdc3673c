//! Man pages and completions, from the definition of the command line.

use std::fs;
use std::io::Write as _;

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_mangen::Man;

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::output;

/// Writes a page for the program and one for each command.
pub(crate) fn man(args: &ManArgs) -> Result<()> {
    fs::create_dir_all(&args.out).with_context(|| format!("cannot create {}", args.out.display()))?;
    let mut command = Cli::command();
    command.build();
    let mut pages = Vec::new();
    render(&command, "manylane", &mut pages)?;
    for (name, page) in pages {
        let path = args.out.join(format!("{name}.1"));
        let mut file = output::create(&path)?;
        file.write_all(&page).with_context(|| format!("cannot write {}", path.display()))?;
        output::print(&format!("{}\n", path.display()))?;
    }
    Ok(())
}

fn render(command: &clap::Command, name: &str, pages: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let mut page = Vec::new();
    Man::new(command.clone()).title(name.to_uppercase()).render(&mut page).context("cannot write a page")?;
    pages.push((name.to_owned(), page));
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        render(sub, &format!("{name}-{}", sub.get_name()), pages)?;
    }
    Ok(())
}

/// Prints the completions of one shell.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "manylane", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}
