// How many powers of two each module's largest numbers were below fp16's largest, by step.
import { inTurn, insisted } from 'http'
import { count, number } from 'formats'
import { createRowsMap } from 'layers'

const AMPLE = 16 // powers of two: no fainter from here on

/** @param {number|string|null} left "-Infinity": inf or NaN was there */
const drawable = (left) => (left === null ? null : Math.min(Math.max(Number(left), 0), AMPLE))

/** @param {number|string|null} left */
const words = (left) =>
  left === null ? 'nothing but zeros' : Number(left) < 0 ? 'none left' : `${number(left, 2)} powers of two left`

/** @param {Found} section @param {string} api address of the run */
export const createHeadroom = (section, api) => {
  const map = createRowsMap(section, '[data-headroom-plot]')
  const refresh = inTurn(async () => {
    const { steps, modules, left } = await (await insisted(`${api}/headroom`)).json()
    map.draw({
      steps,
      rows: modules,
      z: left.map((row) => row.map(drawable)),
      words: left.map((row, i) => row.map((each, j) => `${modules[i]}, step ${count(steps[j])}: ${words(each)}`)),
      more: (colors) => ({
        zmin: 0,
        zmax: AMPLE,
        colorscale: [
          [0, colors.skip],
          [5 / AMPLE, colors.scale],
          [1, colors.card],
        ],
      }),
    })
  })
  refresh()
  return { refresh }
}
