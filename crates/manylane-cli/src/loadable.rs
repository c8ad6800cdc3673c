//! Decides from a program's file whether the library can be loaded into it.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use manylane_sys::process;
use object::elf::{NT_GO_BUILD_ID, PT_INTERP, PT_NOTE};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{NativeEndian, ReadCache, ReadRef};

use crate::find;

/// Maximum depth of scripts whose interpreter is a script, as in the kernel.
const INTERPRETER_DEPTH_MAX: usize = 5;
/// Number of bytes that the kernel reads of a script's first line.
const FIRST_LINE_LEN: usize = 256;

/// The reason why a program runs without lanes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotLoadable {
    /// The file in question: the program, or the interpreter of a script.
    file: PathBuf,
    reason: Reason,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Reason {
    Static,
    Go,
    OtherLibc(String),
    OtherMachine(String),
    SetId(&'static str),
    Capabilities,
    Unreadable,
    NotElf,
    NoInterpreter(OsString),
}

impl NotLoadable {
    /// True if the dynamic linker would only print an error about the library.
    pub(crate) fn cannot_load(&self) -> bool {
        !matches!(self.reason, Reason::Go | Reason::Unreadable)
    }

    /// The same, of a file that users know by another path.
    pub(crate) fn with_file(self, file: PathBuf) -> Self {
        Self { file, ..self }
    }

    /// One line about it.
    pub(crate) fn message(&self) -> String {
        let why = match &self.reason {
            Reason::Static => {
                "is statically linked, and loads no library (use a dynamically linked build)".into()
            }
            Reason::Go => {
                "is a Go program, which makes system calls without the C library (let it open a socket per CPU, with SO_REUSEPORT)".into()
            }
            Reason::OtherLibc(loader) => {
                format!("is linked with another C library ({loader}), but the library needs glibc (use a build for glibc)")
            }
            Reason::OtherMachine(machine) => {
                let ours = std::env::consts::ARCH;
                format!("is a program for {machine}, but the library is for {ours} (use a build for {ours})")
            }
            Reason::SetId(what) => format!(
                "is {what}, and runs in secure-execution mode, which ignores LD_PRELOAD (clear that bit, and start it as its owner or group)"
            ),
            Reason::Capabilities => {
                "has file capabilities, and runs in secure-execution mode, which ignores LD_PRELOAD (give it ambient capabilities instead, for example by AmbientCapabilities= of systemd)".into()
            }
            Reason::Unreadable => {
                "is not readable, so Manylane cannot check if it loads the library (let this user read it)".into()
            }
            Reason::NotElf => {
                "is neither an ELF file nor a script (name its interpreter before it)".into()
            }
            Reason::NoInterpreter(name) => format!(
                "is a script for {}, which does not exist (install it, or change the first line of the script)",
                Path::new(name).display()
            ),
        };
        format!("{} {why}", self.file.display())
    }
}

/// Checks the file of a program, or for scripts the file of the interpreter.
pub(crate) fn check(program: &Path) -> Result<(), NotLoadable> {
    let mut file = program.to_owned();
    for _ in 0..INTERPRETER_DEPTH_MAX {
        let beyond = |why| Err(NotLoadable { file: file.clone(), reason: why });
        let Ok(mut open) = open_regular(&file) else {
            return beyond(Reason::Unreadable);
        };
        let mut first = Vec::new();
        if open.by_ref().take(FIRST_LINE_LEN as u64).read_to_end(&mut first).is_err() {
            return beyond(Reason::Unreadable);
        }
        if first.starts_with(b"\x7fELF") {
            return match secure_exec_reason(&file).map_or_else(|| check_elf(&first, &open), Err) {
                Ok(()) => Ok(()),
                Err(why) => beyond(why),
            };
        }
        // The kernel ignores the set-user-ID bits of scripts.
        file = match interpreter(&first) {
            Some(name) => match find::program(&name) {
                Ok(file) => file,
                Err(_) => return beyond(Reason::NoInterpreter(name)),
            },
            // execvp(3) runs files of an unknown format by the shell.
            None if is_text(&first) => "/bin/sh".into(),
            None => return beyond(Reason::NotElf),
        };
    }
    Err(NotLoadable { file, reason: Reason::NotElf })
}

/// Opens a regular file. A FIFO or a device that has the name is not waited for.
fn open_regular(path: &Path) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// The program in a line that begins with `#!`; for `/usr/bin/env NAME` it is NAME.
fn interpreter(first: &[u8]) -> Option<OsString> {
    let line = first.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let mut words = line.split(|byte| b" \t\r".contains(byte)).filter(|word| !word.is_empty());
    let program = words.next()?;
    let is_env = Path::new(OsStr::from_bytes(program)).file_name() == Some("env".as_ref());
    // The name is the first word that is neither an option nor a variable of env.
    let mut named = || words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='));
    let name = if is_env { named().unwrap_or(program) } else { program };
    Some(OsString::from_vec(name.to_vec()))
}

fn is_text(first: &[u8]) -> bool {
    !first.contains(&0)
}

/// The reason why the kernel would start it in secure-execution mode, if any.
fn secure_exec_reason(file: &Path) -> Option<Reason> {
    let about = fs::metadata(file).ok()?;
    // With this set (as by NoNewPrivileges= of systemd), none of these bits counts.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    if status.lines().any(|line| line.split_whitespace().eq(["NoNewPrivs:", "1"])) {
        return None;
    }
    let (user, group) = process::real_user();
    let mode = about.permissions().mode();
    if mode & 0o4000 != 0 && about.uid() != user {
        return Some(Reason::SetId("set-user-ID"));
    }
    // Without execute permission for the group, the bit has another meaning.
    if mode & 0o2010 == 0o2010 && about.gid() != group {
        return Some(Reason::SetId("set-group-ID"));
    }
    // Root has all capabilities anyway.
    (user != 0 && process::has_capabilities(file)).then_some(Reason::Capabilities)
}

/// Checks an ELF file, whose first bytes are `first`.
fn check_elf(first: &[u8], file: &File) -> Result<(), Reason> {
    // e_ident[EI_CLASS], e_ident[EI_DATA] and e_machine.
    let (Some(&class @ 1..=2), Some(&data), Some(&machine)) =
        (first.get(4), first.get(5), first.get(18..).and_then(<[u8]>::first_chunk))
    else {
        return Err(Reason::NotElf);
    };
    let is_little = data == 1;
    let machine = if is_little { u16::from_le_bytes(machine) } else { u16::from_be_bytes(machine) };
    let is_ours = is_little == cfg!(target_endian = "little")
        && usize::from(class) * 4 == size_of::<usize>()
        && OWN_MACHINE.is_none_or(|ours| ours == machine);
    if !is_ours {
        return Err(Reason::OtherMachine(machine_name(machine, class)));
    }
    let info = parse_elf(BoundedFile { file: &ReadCache::new(file), left: &Cell::new(READ_LEN_MAX) })
        .map_err(|_| Reason::NotElf)?;
    // Checked first: a Go program cannot use the library even if it is linked dynamically.
    if info.go {
        return Err(Reason::Go);
    }
    match info.loader {
        None => Err(Reason::Static),
        Some(loader) if is_other_libc(&loader) => Err(Reason::OtherLibc(loader)),
        Some(_) => Ok(()),
    }
}

/// The relevant facts of an ELF file.
#[derive(Debug, Default)]
struct ElfInfo {
    loader: Option<String>,
    go: bool,
}

/// Maximum number of bytes that are read of a file: far more than the headers, the notes and the
/// names of sections of any program have.
const READ_LEN_MAX: u64 = 16 << 20;

/// A file of which no more is read than that. It may be another user's program: a hole in it costs
/// no disk, and could be as large as the memory of this machine.
#[derive(Clone, Copy)]
struct BoundedFile<'data> {
    file: &'data ReadCache<&'data File>,
    left: &'data Cell<u64>,
}

impl BoundedFile<'_> {
    fn spend(self, bytes: u64) -> Result<(), ()> {
        self.left.set(self.left.get().checked_sub(bytes).ok_or(())?);
        Ok(())
    }
}

impl<'data> ReadRef<'data> for BoundedFile<'data> {
    fn len(self) -> Result<u64, ()> {
        self.file.len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'data [u8], ()> {
        self.spend(size)?;
        self.file.read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'data [u8], ()> {
        /// Maximum length of a name that the file reads.
        const NAME_LEN_MAX: u64 = 4096;
        self.spend(range.end.saturating_sub(range.start).min(NAME_LEN_MAX))?;
        self.file.read_bytes_at_until(range, delimiter)
    }
}

#[cfg(target_pointer_width = "64")]
type OwnHeader = object::elf::FileHeader64<NativeEndian>;
#[cfg(target_pointer_width = "32")]
type OwnHeader = object::elf::FileHeader32<NativeEndian>;

/// Parses an ELF file for this machine.
fn parse_elf<'data>(data: impl ReadRef<'data>) -> object::read::Result<ElfInfo> {
    let header = OwnHeader::parse(data)?;
    let endian = header.endian()?;
    let mut info = ElfInfo::default();
    for segment in header.program_headers(endian, data)? {
        if segment.p_type(endian) == PT_INTERP {
            let path = segment.data(endian, data).unwrap_or_default();
            let path = path.split(|&byte| byte == 0).next().unwrap_or_default();
            info.loader = Some(String::from_utf8_lossy(path).into_owned());
        }
        // Go programs have this note even if their sections are stripped.
        if segment.p_type(endian) == PT_NOTE
            && let Ok(Some(mut notes)) = segment.notes(endian, data)
        {
            while let Ok(Some(note)) = notes.next() {
                info.go |= note.name() == b"Go" && note.n_type(endian) == NT_GO_BUILD_ID;
            }
        }
    }
    // Sections are for debuggers: a program may lack them.
    if let Ok(sections) = header.sections(endian, data) {
        info.go |= sections
            .iter()
            .any(|section| sections.section_name(endian, section).is_ok_and(|name| name == b".go.buildinfo"));
    }
    Ok(info)
}

fn is_other_libc(loader: &str) -> bool {
    let name = loader.rsplit('/').next().unwrap_or_default();
    name.starts_with("ld-musl") || name.starts_with("ld-uClibc") || name.starts_with("linker")
}

/// The machine that this program is built for; `None` if it is not in this list.
const OWN_MACHINE: Option<u16> = if cfg!(target_arch = "x86_64") {
    Some(object::elf::EM_X86_64)
} else if cfg!(target_arch = "aarch64") {
    Some(object::elf::EM_AARCH64)
} else if cfg!(target_arch = "riscv64") {
    Some(object::elf::EM_RISCV)
} else {
    None
};

fn machine_name(machine: u16, class: u8) -> String {
    let name = match machine {
        object::elf::EM_386 => "i386",
        object::elf::EM_X86_64 if class == 1 => "x32 (32-bit x86_64)",
        object::elf::EM_X86_64 => "x86_64",
        object::elf::EM_ARM => "32-bit ARM",
        object::elf::EM_AARCH64 => "aarch64",
        object::elf::EM_RISCV => "RISC-V",
        object::elf::EM_PPC64 => "ppc64",
        object::elf::EM_S390 => "s390x",
        other => return format!("another machine (ELF machine {other}, {} bits)", u32::from(class) * 32),
    };
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreters_of_scripts() {
        for (line, program) in [
            ("#!/bin/sh\n", Some("/bin/sh")),
            ("#! /usr/bin/python3 -u\r\n", Some("/usr/bin/python3")),
            ("#!/usr/bin/env python3\n", Some("python3")),
            ("#!/usr/bin/env -S A=1 node --x\n", Some("node")),
            ("#!/usr/bin/env\n", Some("/usr/bin/env")),
            ("#!\n", None),
            ("echo hello\n", None),
        ] {
            assert_eq!(interpreter(line.as_bytes()), program.map(OsString::from), "{line}");
        }
    }

    #[test]
    fn opening_a_fifo_does_not_block() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("program (deleted)");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_eq!(check(&path).unwrap_err().reason, Reason::Unreadable);
    }

    /// A program that is only a header.
    fn header(class: u8, data: u8, machine: u16) -> Vec<u8> {
        let mut bytes = vec![0; if class == 1 { 52 } else { 64 }];
        bytes[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, data, 1]);
        bytes[16] = 2;
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[20] = 1;
        bytes
    }

    #[test]
    fn foreign_executables_are_rejected() {
        let folder = tempfile::TempDir::new().unwrap();
        let judge = |bytes: &[u8]| {
            let path = folder.path().join("program");
            fs::write(&path, bytes).unwrap();
            check(&path).map_err(|beyond| beyond.message())
        };
        for (bytes, hint) in [
            (header(1, 1, object::elf::EM_386), "i386"),
            (header(2, 1, object::elf::EM_S390), "s390x"),
            (header(2, 1, 4711), "4711"),
            (header(2, 1, OWN_MACHINE.unwrap()), "statically linked"),
            (b"\x7fELF".to_vec(), "neither an ELF file"),
            (vec![0; 100], "neither an ELF file"),
            (b"#!/no/such/interpreter\n".to_vec(), "/no/such/interpreter"),
        ] {
            let line = judge(&bytes).unwrap_err();
            assert!(line.contains(hint), "{line} does not hint at {hint}");
            assert!(line.ends_with(')') && line.contains(" ("), "{line} has no remedy");
        }
        assert_eq!(judge(b"#!/bin/sh\nexit\n"), Ok(()));
        assert_eq!(judge(b"exit 3\n"), Ok(()));
        // A script that is its own interpreter does not loop.
        let itself = format!("#!{}\n", folder.path().join("program").display());
        assert!(judge(itself.as_bytes()).is_err());
        assert_eq!(check(Path::new("/bin/sh")), Ok(()));
    }

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn a_note_that_is_a_large_hole_is_not_read() {
        let reason = |note_len: u64| {
            let mut bytes =
                header(2, if cfg!(target_endian = "little") { 1 } else { 2 }, OWN_MACHINE.unwrap());
            bytes[18..20].copy_from_slice(&OWN_MACHINE.unwrap().to_ne_bytes());
            bytes[32..40].copy_from_slice(&64_u64.to_ne_bytes());
            bytes[54..56].copy_from_slice(&56_u16.to_ne_bytes());
            bytes[56..58].copy_from_slice(&1_u16.to_ne_bytes());
            bytes.extend([PT_NOTE, 4].iter().flat_map(|word| word.to_ne_bytes()));
            bytes.extend([120, 0, 0, note_len, note_len, 4].iter().flat_map(|word: &u64| word.to_ne_bytes()));
            bytes.extend([4, 4, NT_GO_BUILD_ID].iter().flat_map(|word: &u32| word.to_ne_bytes()));
            bytes.extend(*b"Go\0\0 id ");
            let mut file = tempfile::NamedTempFile::new().unwrap();
            io::Write::write_all(&mut file, &bytes).unwrap();
            file.as_file().set_len(120 + note_len).unwrap();
            check(file.path()).unwrap_err().reason
        };
        assert_eq!(reason(20), Reason::Go);
        assert_eq!(reason(2 * READ_LEN_MAX), Reason::Static);
    }

    #[test]
    fn the_c_library_is_recognized_by_its_loader() {
        assert!(is_other_libc("/lib/ld-musl-x86_64.so.1") && is_other_libc("/system/bin/linker64"));
        assert!(
            !is_other_libc("/lib64/ld-linux-x86-64.so.2") && !is_other_libc("/nix/store/x/ld-linux.so.2")
        );
    }
}
