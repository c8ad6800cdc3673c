//! The papers, and the numbers in them.

use manylane_measure::named_enum;
use serde::{Deserialize, Serialize};

named_enum! {
    /// The papers whose experiments are here, in the order of a run of everything.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Paper {
        /// Rivera, Achá, Bustos-Jiménez, Piquer: threads that read one UDP socket.
        Rivera = "rivera",
        /// Sarma, McKenney: scalability of the 2.6 kernel.
        Sarma = "sarma",
        /// Orlowsky: message headers that the kernel stores.
        Orlowsky = "orlowsky",
        /// Priambodo, Ashari: receivers and round-trip times.
        Priambodo = "priambodo",
        /// Salesforce: a proxy on a TCP stack in user space.
        Salesforce = "salesforce",
    }
}

/// One number of a paper.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PaperValue {
    /// Name of the table.
    pub table: &'static str,
    /// Line of the table.
    pub line: &'static str,
    /// Column of the table.
    pub column: &'static str,
    /// The number, in the unit of our rows.
    pub value: f64,
}
