/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Finds the function of a step. */
#include "differential.h"

#include <string.h>

bool run_call(const struct call *calls, size_t count, struct step *step)
{
	for (size_t at = 0; at < count; at++) {
		if (!strcmp(step->name, calls[at].name)) {
			calls[at].run(step);
			return true;
		}
	}
	return false;
}

void run(struct step *step)
{
	if (run_receive(step))
		return;
	shared->begun_ms[step->actor] = now_ms();
	if (run_send(step))
		return;
	on_possible_fallback();
	if (!run_wait(step) && !run_socket(step) && !run_descriptor(step))
		print(" what is %s?", step->name);
}
