//! A refusal, an account or a name that the CUDA backend gets wrong on any machine: the seam's
//! promises, each asked of it on the fake driver. That driver does everything at once, so what
//! these show of order is only that the backend asks for it without an error.

use crate::fake::{Alive, alive, name_of, story};

macro_rules! stories {
    (; $($topic:ident::$promise:ident,)*) => {
        $(#[test]
        fn $promise() {
            story(name_of!($promise), "", || {
                let rigs = crate::cuda_rig::cuda();
                assert_eq!(rigs.len(), 1, "the fake driver has a device");
                rigs.iter().for_each(|rig| crate::$topic::$promise(&**rig));
                let Alive { streams, events, pinned, holds, ranges, handles, mapped, .. } = alive();
                assert_eq!((streams, events, pinned, holds), (0, 0, 0, 0), "left behind");
                assert_eq!((ranges, handles, mapped), (0, 0, 0), "left mapped");
            });
        })*
    };
}

each_promise! { stories! }
