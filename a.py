from b import *
d,s,w=exc('03')
for r in (11,12,13):
    x=w[(w['rank']==r)&(w.iteration.isin([1,2,41,61]))&w.kind.isin(['compute','optimizer'])&w.name.isin(['mlp','mlp-backward','attention','attention-backward','optimizer'])]
    print(r); print(x.pivot_table(index=['iteration','microbatch'],columns='key',values='rel',aggfunc='mean').round(2).to_string())
x=s[(s['rank']==13)&(s.iteration==1)][['kind','name','phase','layer','microbatch','start_ns','dm','sm','wm','tm','track','launch_ns','size_bytes','peer']].copy()
x.start_ns=(x.start_ns-x.start_ns.min())/1e6; print(x.head(60).to_string())
o=s[s.kind=='optimizer']; print(o[o.name=='optimizer'].pivot_table(index='rank',columns='iteration',values='sm').iloc[:,:12].round(2))
