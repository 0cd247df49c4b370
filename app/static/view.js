// How somebody looks at the charts: kept in the address, so a reload or a link shows the same.

/** @typedef {{x: 'step'|'applied'|'time', loss: 'linear'|'log', smooth: number, range: [number, number]|null}} View */

/** @returns {View} */
export const readView = () => {
  const query = new URLSearchParams(location.search)
  const range = (query.get('range') ?? '').split(',').map(Number)
  return {
    x: ['applied', 'time'].find((name) => name === query.get('x')) ?? 'step',
    loss: query.get('loss') === 'log' ? 'log' : 'linear',
    smooth: Math.min(Math.max(Number(query.get('smooth')) || 0, 0), 0.99),
    range: range.length === 2 && range.every(Number.isFinite) ? range : null,
  }
}

/** @param {View} view */
export const writeView = (view) => {
  const address = new URL(location.href)
  const set = (name, value, usual) =>
    (value === usual ? address.searchParams.delete(name) : address.searchParams.set(name, value))
  set('x', view.x, 'step')
  set('loss', view.loss, 'linear')
  set('smooth', view.smooth, 0)
  set('range', view.range?.map((x) => Number(x.toPrecision(8))).join(',') ?? null, null)
  history.replaceState(null, '', address)
}
