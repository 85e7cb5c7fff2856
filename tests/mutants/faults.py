"""The seeded faults of `make mutants`: one change of the source each, and the tests that must notice it.

`old` stands exactly once in its file, which `test_faults.py` checks in every run of the tests. Who changes such a line
moves the fault along; who removes what it was about removes the fault, and says why.
"""

from __future__ import annotations

from dataclasses import dataclass

AREAS = ("noise", "clip", "centre", "modulus", "accounting", "adjacency", "durability", "colluding")
"""What faults are about: there are some of each."""


@dataclass(frozen=True)
class Fault:
    """One thing wrong.

    Attributes:
        area: One of `AREAS`.
        name: What is wrong.
        file: Below src/cpsgd.
        old: The right text.
        new: The wrong one.
        tests: What pytest runs; one of them must fail.
    """

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    # ------------------------------------------------------------------ noise
    Fault(
        "noise",
        "coins are not added",
        "mechanisms/binomial.py",
        '        """Largest noise of a client: m, when all coins show heads."""\n        return self.trials',
        '        """Largest noise of a client: m, when all coins show heads."""\n        return 0',
        ("tests/audit/test_surveys.py::test_the_product_passes",),
    ),
    Fault(
        "noise",
        "two coins too few by inversion",
        "mechanisms/binomial.py",
        "weight = upper[-1] * (trials - j) * odds",
        "weight = upper[-1] * (trials - 2 - j) * odds",
        ("tests/mechanisms/test_binomial.py::test_the_table_is_within_its_stated_distance",),
    ),
    Fault(
        "noise",
        "more coins than are counted exactly are called exact",
        "mechanisms/binomial.py",
        "return (p == 0.5 and trials <= MAX_COINS) or trials == 0",
        "return (p == 0.5 and trials <= 2 * MAX_COINS) or trials == 0",
        (
            "tests/mechanisms/test_binomial.py::test_coins_are_exact",
            "tests/mechanisms/test_binomial.py::test_the_table_is_within_its_stated_distance",
        ),
    ),
    Fault(
        "noise",
        "the same key for every message",
        "randomness.py",
        "algorithms.AES128(os.urandom(16))",
        "algorithms.AES128(bytes(16))",
        (
            "tests/codec/test_pipeline.py::test_every_call_draws_fresh_noise",
            "tests/test_randomness.py::test_streams_differ",
        ),
    ),
    Fault(
        "noise",
        "a keystream goes on in a forked child",
        "randomness.py",
        "if os.getpid() != self._process:",
        "if self._process == 0:",
        ("tests/test_randomness.py::test_a_stream_does_not_go_on_in_a_forked_child",),
    ),
    Fault(
        "noise",
        "Skellam noise of half the variance",
        "mechanisms/skellam.py",
        "above, here = here, above + 2 * j * exact.denominator * here // exact.numerator",
        "above, here = here, above + 4 * j * exact.denominator * here // exact.numerator",
        ("tests/mechanisms/test_symmetric.py::test_the_table_is_within_its_stated_distance",),
    ),
    Fault(
        "noise",
        "discrete Gaussian noise of half the variance",
        "mechanisms/discrete_gaussian.py",
        "ratio = (Decimal(-1) / (2 * Decimal(variance))).exp()",
        "ratio = (Decimal(-1) / Decimal(variance)).exp()",
        ("tests/mechanisms/test_symmetric.py::test_the_table_is_within_its_stated_distance",),
    ),
    Fault(
        "noise",
        "fine Gaussian noise is too narrow",
        "mechanisms/fine_gaussian.py",
        "grown * (-2 * (pi * Decimal(ratio) * t) ** 2).exp()",
        "grown * (-1 * (pi * Decimal(ratio) * t) ** 2).exp()",
        ("tests/mechanisms/test_fine_gaussian.py::test_draws_are_as_close_to_the_gaussian_as_said",),
    ),
    Fault(
        "noise",
        "rounding by two random bits",
        "codec/_kernels/numpy_twin.py",
        "((words & 0xFFFF) >> (16 - self._bits))) >> self._bits",
        "((words & 0xC000) >> (16 - self._bits))) >> self._bits",
        ("tests/codec/_kernels/test_numpy_twin.py::test_quantize_is_the_same",),
    ),
    # ------------------------------------------------------------------ clip
    Fault(
        "clip",
        "vectors may be two percent too long",
        "codec/clip.py",
        "bound = clip_norm * (1.0 - MARGIN)",
        "bound = clip_norm * 1.02",
        ("tests/codec/test_clip.py",),
    ),
    Fault(
        "clip",
        "the grid point may be two percent too long",
        "codec/clip.py",
        "* slack) <= norm_limit * norm_limit:",
        "* slack) <= 1.04 * norm_limit * norm_limit:",
        ("tests/codec/test_clip.py",),
    ),
    Fault(
        "clip",
        "no second look at the norm",
        "codec/pipeline.py",
        "clip.enforce(points, norm_limit=stages.norm_limit, coordinate_limit=grid.limit, squared=squared)",
        "pass",
        ("tests/codec/test_pipeline.py::test_the_grid_point_is_within_the_clip_norm",),
    ),
    Fault(
        "clip",
        "the grid adds nothing to a stated distance",
        "codec/clip.py",
        "return (real + math.sqrt(dim) + _FLOAT_SLACK",
        "return (real + _FLOAT_SLACK",
        ("tests/codec/test_apart.py::test_no_pair_is_further_apart_on_the_grid",),
    ),
    # ------------------------------------------------------------------ centre
    Fault(
        "centre",
        "levels are counted from one",
        "mechanisms/lattice.py",
        "return self.noise.mean + (self.levels - 1) / 2",
        "return self.noise.mean + self.levels / 2",
        (
            "tests/test_aggregator.py::test_vectors_on_the_levels_have_exactly_their_mean",
            "tests/audit/test_playing.py::test_the_middle_is_where_the_wires_integers_lie",
            "tests/audit/test_surveys.py::test_the_product_passes",
        ),
    ),
    Fault(
        "centre",
        "the mean is over one message more",
        "codec/pipeline.py",
        "factor: float = protocol.mechanism.scale / count",
        "factor: float = protocol.mechanism.scale / (count + 1)",
        ("tests/test_aggregator.py::test_the_mean_is_over_the_messages_received",),
    ),
    Fault(
        "centre",
        "halves are rounded another way than the centre says",
        "correlated/run_gaussian.py",
        "return 0.5 * (window - 1) + math.ldexp(0.5, -finest_bits)",
        "return 0.5 * window + math.ldexp(0.5, -finest_bits)",
        ("tests/audit/test_playing.py::test_the_middle_is_where_the_wires_integers_lie",),
    ),
    # ------------------------------------------------------------------ modulus
    Fault(
        "modulus",
        "sums are read modulo one more",
        "codec/pipeline.py",
        "np.mod(sums.astype(np.int64) - lowest, protocol.modulus)",
        "np.mod(sums.astype(np.int64) - lowest, protocol.modulus + 1)",
        (
            "tests/audit/test_surveys.py::test_the_product_passes",
            "tests/mechanisms/test_coins.py::test_sums_under_a_modulus_decode_to_the_mean",
        ),
    ),
    Fault(
        "modulus",
        "sums are looked for on one side of the middle",
        "codec/pipeline.py",
        "lowest = math.ceil(middle - 0.5 * protocol.modulus)",
        "lowest = math.ceil(middle)",
        ("tests/test_aggregator.py::test_a_modulus_from_the_concentration_of_the_sum_recovers_it",),
    ),
    Fault(
        "modulus",
        "a modulus may be smaller than a client's values",
        "protocol.py",
        "self.modulus, low=self.mechanism.values, high=MAX_RADIX",
        "self.modulus, low=2, high=MAX_RADIX",
        ("tests/test_protocol.py::test_bad_parameters_are_named",),
    ),
    # ------------------------------------------------------------------ accounting
    Fault(
        "accounting",
        "half of δ(ε) of the Gaussian mechanism",
        "privacy/gaussian.py",
        "scale = 0.5 * math.exp(-0.5 * near * near)",
        "scale = 0.25 * math.exp(-0.5 * near * near)",
        ("tests/privacy/test_gaussian.py::test_delta_is_an_upper_bound_and_sharp",),
    ),
    Fault(
        "accounting",
        "1.25 of the classical lemma is 1",
        "privacy/gaussian.py",
        "math.log(1.25 / ",
        "math.log(1.0 / ",
        ("tests/privacy/test_gaussian.py::test_classical_lemma",),
    ),
    Fault(
        "accounting",
        "the sampler's resolution costs nothing",
        "privacy/proofs/argument.py",
        "return draws * run.protocol.dim * run.protocol.mechanism.noise.variation",
        "return 0.0 * draws",
        ("tests/privacy/test_guarantees.py::test_samplers_total_variation_is_paid_from_delta",),
    ),
    Fault(
        "accounting",
        "ε is six tenths of what is proved",
        "privacy/guarantees.py",
        "return Guarantee(Claim(proved.epsilon, delta)",
        "return Guarantee(Claim(0.6 * proved.epsilon, delta)",
        ("tests/privacy/test_guarantees.py::test_gaussian_protocol",),
    ),
    Fault(
        "accounting",
        "neighbours are taken to be closer than they can be",
        "mechanisms/interface.py",
        "ball, side = adjacency.distance(clip_norm) / self.unit, adjacency.distance(self.half)",
        "ball, side = 0.97 * adjacency.distance(clip_norm) / self.unit, adjacency.distance(self.half)",
        (
            "tests/test_neighbours.py::test_no_neighbours_are_further_apart",
            "tests/audit/test_playing.py::test_the_corner_is_as_far_as_neighbours_can_be",
        ),
    ),
    Fault(
        "accounting",
        "rounds are accounted as one",
        "privacy/accountant.py",
        "return _composed_epsilon([(r, participation) for r in rounds], delta, interval)",
        "return _composed_epsilon([(replace(r, count=1), participation) for r in rounds], delta, interval)",
        ("tests/privacy/test_accountant.py::test_gaussians_compose_as_the_root_of_summed_squares",),
    ),
    # ------------------------------------------------------------------ adjacency
    Fault(
        "adjacency",
        "replacing a client is as near as leaving it out",
        "neighbours.py",
        "return {Adjacency.REPLACE_ONE: 2.0, Adjacency.ZERO_OUT: 1.0}[self]",
        "return {Adjacency.REPLACE_ONE: 1.0, Adjacency.ZERO_OUT: 1.0}[self]",
        ("tests/test_neighbours.py::test_distances",),
    ),
    Fault(
        "adjacency",
        "a stated distance counts for zero-out, too",
        "neighbours.py",
        "if replace_one_distance is None or self is not Adjacency.REPLACE_ONE:",
        "if replace_one_distance is None:",
        ("tests/test_neighbours.py::test_a_stated_distance_is_one_of_two_clients_and_not_from_zero",),
    ),
    # ------------------------------------------------------------------ durability
    Fault(
        "durability",
        "the ledger does not wait for the disk",
        "_durable.py",
        "            left = left[os.write(file.fileno(), left) :]\n        os.fsync(file.fileno())\n",
        "            left = left[os.write(file.fileno(), left) :]\n",
        ("tests/ledger/test_log.py::test_records_are_on_the_disk_before_a_call_returns",),
    ),
    Fault(
        "durability",
        "two processes may read a budget before one spends it",
        "_record_log.py",
        "hold(file, self._timeout, shared=reading)",
        "hold(file, self._timeout, shared=True)",
        ("tests/ledger/test_log.py::test_a_second_writer_waits_before_it_reads_what_is_left",),
    ),
    Fault(
        "durability",
        "a changed record of a client's memory is believed",
        "_record_log.py",
        "if stated != digest if written else end.written:",
        "if False if written else end.written:",
        ("tests/test_record_log.py::test_every_changed_bit_is_noticed_or_changes_nothing",),
    ),
    Fault(
        "durability",
        "a torn record of a client's memory stays",
        "_record_log.py",
        "if self._file.seek(0, os.SEEK_END) != start.size - unended:",
        "if False:",
        ("tests/test_record_log.py::test_a_torn_tail_is_cut_off_wherever_it_is_torn",),
    ),
    Fault(
        "durability",
        "a ledger whose last records are gone is opened",
        "ledger/index.py",
        "if len(self._stored) and not self._has(log, -1):",
        "if False:",
        ("tests/ledger/test_log.py::test_a_cut_end_is_found_with_the_index_or_a_head",),
    ),
    Fault(
        "durability",
        "a file is moved into place before it is on the disk",
        "_durable.py",
        "            file.flush()\n            os.fsync(file.fileno())\n",
        "            file.flush()\n",
        ("tests/learning/test_metrics.py", "tests/test_durable.py"),
    ),
    Fault(
        "durability",
        "a history's last rounds are not on the disk",
        "learning/metrics.py",
        "            append(file, new)\n",
        "            file.write(new)\n",
        ("tests/learning/test_metrics.py",),
    ),
    # ------------------------------------------------------------------ colluding
    Fault(
        "colluding",
        "colluding clients' noise counts in a guarantee",
        "promise.py",
        "return self.surviving - self.colluding",
        "return self.surviving",
        (
            "tests/privacy/test_guarantees.py::test_only_honest_noise_that_arrived_counts",
            "tests/planner/test_planning.py::test_the_gaussian_beside_it_has_the_honest_survivors_noise_alone",
        ),
    ),
    Fault(
        "colluding",
        "colluding clients' noise counts over rounds",
        "privacy/proofs/argument.py",
        "seen_cost(of_size(run, size), proof, share * delta / run.rounds, run.sampling)",
        "seen_cost(of_size(run, size + run.colluding), proof, share * delta / run.rounds, run.sampling)",
        ("tests/privacy/test_rounds.py::test_collusion_counts_like_dropping_out",),
    ),
    Fault(
        "colluding",
        "colluding clients' noise counts in a plan",
        "planner/problem.py",
        "            colluding=colluding,\n",
        "            colluding=0 * colluding,\n",
        ("tests/planner/test_planning.py::test_the_gaussian_beside_it_has_the_honest_survivors_noise_alone",),
    ),
    Fault(
        "colluding",
        "a ledger takes rounds of colluding clients alone",
        "ledger/entries.py",
        "if self.survivors <= self.colluding:",
        "if self.survivors < self.colluding:",
        ("tests/ledger/test_entries.py::test_colluding_clients_protect_nobody",),
    ),
    Fault(
        "colluding",
        "as many accusers as may collude prove a fault",
        "federation/course.py",
        "if len(accusers) > self._colluding}",
        "if len(accusers) >= self._colluding}",
        (
            "tests/federation/test_course.py::test_who_spoils_one_other_node_per_round_is_found_out_as_well",
            "tests/federation/test_conduct.py::test_few_accusers_prove_nothing",
        ),
    ),
    Fault(
        "accounting",
        "a client answers one round too many",
        "federation/limits.py",
        "before.get(kind, 0) < rounds:",
        "before.get(kind, 0) <= rounds:",
        ("tests/federation/test_answering.py::test_a_client_answers_as_many_rounds_as_it_may_and_no_more",),
    ),
)
