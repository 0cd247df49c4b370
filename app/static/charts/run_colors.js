// Colours of runs: each has its own, the same in the list, in charts, notes and sweeps.
const COLORS = 10

/**
 * The place of each run's line: the ones digit is its colour, the tens are its dashes. As app/compare/run_colors.py.
 * @param {Iterable<string>} ids
 * @returns {Map<string, number>}
 */
export const placesOf = (ids) => {
  /** @type {Map<string, number>} */
  const places = new Map()
  const taken = new Set()
  for (const id of [...new Set(ids)].sort((a, b) => Number(a) - Number(b))) {
    let turn = 0
    const place = () => Math.floor(turn / COLORS) * COLORS + ((Number(id) + turn) % COLORS)
    while (taken.has(place())) turn += 1
    taken.add(place())
    places.set(id, place())
  }
  return places
}

/** The class of a sample of a line, as compare.css has them. @param {number} place */
export const strokes = (place) => `stroke line-${place % COLORS} dash-${Math.floor(place / COLORS) % 5}`
