//! The stack against random bytes, each case as long as a few hundred packets.

use proptest::prelude::*;

use crate::hostile::check;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn no_input_breaks_the_stack(bytes in proptest::collection::vec(any::<u8>(), 0..6000)) {
        check(&bytes);
    }
}
