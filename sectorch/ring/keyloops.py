"""Compiled loops for function keys (`mpc/star/fss.py`): what stands between the calls of AES, one call a level.

A block is two words. The generator's input of a seed s is s ^ j: j is 0 and 1 for the seeds of the left and the right
child, and 2 and 3 for their payloads. The file stands alone because it imports numba.
"""

from __future__ import annotations

from .jit import compiled

_FLAGS = ~3
"""Without the two low bits, where j stands, and where a generated block carries the control bit."""


@compiled
def first_evaluation(seeds, paths, inputs):
    """Write the generator's inputs of the first level: [seeds, payloads], [2, points, 2]."""
    count = len(seeds)
    for i in range(len(paths)):
        right = (paths[i] >> 63) & 1
        for w in range(2):
            inputs[0, i, w] = seeds[i % count, w]
        inputs[0, i, 0] = (inputs[0, i, 0] & _FLAGS) | right
        inputs[1, i, 0], inputs[1, i, 1] = inputs[0, i, 0] | 2, inputs[0, i, 1]


@compiled
def next_evaluation(level, last, paths, controls, inputs, outputs, seed_words, value_words, totals):
    """Add a level's payloads to the totals, and write the inputs of the next level; `last`: of the leaves' payloads.

    Args:
        controls: masks, [points]. outputs: the generator's, shaped like its inputs.
        seed_words, value_words: [levels, keys, words]. Point i belongs to key i % keys.
    """
    count = seed_words.shape[1]
    for i in range(len(paths)):
        key, t, right = i % count, controls[i], (paths[i] << level) >> 63
        word = seed_words[level, key, 0]
        for w in range(totals.shape[1]):
            totals[i, w] += (inputs[1, i, w] ^ outputs[1, i, w]) + (value_words[level, key, w] & t)
        child, other = inputs[0, i, 0] ^ outputs[0, i, 0], inputs[0, i, 1] ^ outputs[0, i, 1]
        controls[i] = ((child << 63) >> 63) ^ (t & ((word << (63 + right)) >> 63))
        child = (child ^ (word & t)) & _FLAGS
        other ^= seed_words[level, key, 1] & t
        following = 0 if last else ((paths[i] << (level + 1)) >> 63) & 1
        inputs[0, i, 0], inputs[0, i, 1] = child | following, other
        inputs[1, i, 0], inputs[1, i, 1] = child | following | 2, other


@compiled
def last_evaluation(controls, inputs, outputs, value_words, totals, negative):
    """Add the leaves' payloads, and negate the totals if `negative` is -1 and not 0."""
    count = value_words.shape[1]
    for i in range(len(controls)):
        for w in range(totals.shape[1]):
            total = totals[i, w] + (inputs[1, i, w] ^ outputs[1, i, w])
            total += value_words[-1, i % count, w] & controls[i]
            totals[i, w] = (total ^ negative) - negative


@compiled
def first_generation(seeds, inputs):
    """Write the generator's inputs of both evaluators' four blocks: [2, 4, keys, 2]."""
    for p in range(2):
        for i in range(seeds.shape[1]):
            for j in range(4):
                inputs[p, j, i, 0], inputs[p, j, i, 1] = (seeds[p, i, 0] & _FLAGS) | j, seeds[p, i, 1]


@compiled
def next_generation(level, paths, flips, payload, controls, sums, inputs, outputs, seed_words, value_words):
    """Write a level's correction words, and the generator's inputs of the next level along r's path.

    Args:
        flips: masks, all ones where the payload is at c >= r.
        controls: of both evaluators, masks [2, keys].
        sums: the difference of the two evaluators' payloads along the path so far, [keys, words].
    """
    for i in range(len(paths)):
        right = (paths[i] << level) >> 63
        on, off = right & 1, 1 - (right & 1)
        t0, t1 = controls[0, i], controls[1, i]
        # Beside r's path the seeds of the two evaluators must become equal, so that they cancel from there on: the
        # correction word is the difference of the children that leave the path.
        lost = inputs[0, off, i, 0] ^ outputs[0, off, i, 0] ^ inputs[1, off, i, 0] ^ outputs[1, off, i, 0]
        other = inputs[0, off, i, 1] ^ outputs[0, off, i, 1] ^ inputs[1, off, i, 1] ^ outputs[1, off, i, 1]
        at_0, at_1 = inputs[0, on, i, 0] ^ outputs[0, on, i, 0], inputs[1, on, i, 0] ^ outputs[1, on, i, 0]
        to_on, to_off = (at_0 ^ at_1 ^ 1) & 1, lost & 1
        word = (lost & _FLAGS) | (to_on << on) | (to_off << off)
        seed_words[level, i, 0], seed_words[level, i, 1] = word, other
        # Where r's bit is 1, the points that leave the path lie left of r, where c < r: they get the payload, or with
        # `flips` the others do. The second evaluator subtracts its share, so the word has the sign of its control bit.
        for w in range(payload.shape[1]):
            gone = (inputs[1, 2 + off, i, w] ^ outputs[1, 2 + off, i, w]) - (
                inputs[0, 2 + off, i, w] ^ outputs[0, 2 + off, i, w]
            )
            along = (inputs[0, 2 + on, i, w] ^ outputs[0, 2 + on, i, w]) - (
                inputs[1, 2 + on, i, w] ^ outputs[1, 2 + on, i, w]
            )
            change = gone - sums[i, w] + (payload[i, w] & (right ^ flips[i]))
            sums[i, w] += along + change
            value_words[level, i, w] = (change ^ t1) - t1
        # An evaluator applies the correction where its control bit is set; on r's path exactly one of the two has it.
        for p in range(2):
            t = t0 if p == 0 else t1
            child = at_0 if p == 0 else at_1
            second = inputs[p, on, i, 1] ^ outputs[p, on, i, 1] ^ (other & t)
            controls[p, i] = ((child << 63) >> 63) ^ (t & -to_on)
            child = (child ^ (word & t)) & _FLAGS
            for j in range(4):
                inputs[p, j, i, 0], inputs[p, j, i, 1] = child | j, second


@compiled
def last_generation(flips, payload, controls, sums, inputs, outputs, value_words):
    """Write the correction words of the leaves' payloads."""
    for i in range(len(flips)):
        t1 = controls[1, i]
        for w in range(payload.shape[1]):
            change = (inputs[1, 2, i, w] ^ outputs[1, 2, i, w]) - (inputs[0, 2, i, w] ^ outputs[0, 2, i, w])
            change += (payload[i, w] & flips[i]) - sums[i, w]
            value_words[-1, i, w] = (change ^ t1) - t1
