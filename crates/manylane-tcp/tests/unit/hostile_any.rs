//! The stack against random bytes, each case as long as a few hundred packets.

use std::fs;
use std::path::Path;

use proptest::prelude::*;

use crate::hostile::check;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn no_input_breaks_the_stack(bytes in proptest::collection::vec(any::<u8>(), 0..6000)) {
        check(&bytes);
    }
}

/// An input that once broke something belongs there.
#[test]
fn every_file_of_the_corpus_holds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/tcp");
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    for file in &files {
        check(&fs::read(file).unwrap());
    }
    assert!(files.len() >= 6, "{files:?}");
}
